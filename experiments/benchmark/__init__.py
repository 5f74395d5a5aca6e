"""Speed and memory of jattn compared with its peers, measured alternately in one process."""
