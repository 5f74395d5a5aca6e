"""The subcommands, one file for each, and the code they share."""
