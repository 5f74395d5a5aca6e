"""Support for runs of any experiment: folders, checkpoints, console output and exit statuses."""
