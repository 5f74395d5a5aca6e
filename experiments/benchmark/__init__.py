"""Speed and memory of jattn beside its peers, taken in turn in one process."""
