"""Known attention variants, each in one short file: checked, timed, drawn and trained."""
