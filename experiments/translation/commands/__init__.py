"""The subcommands, a file for each, and what they share."""
