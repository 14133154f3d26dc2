"""The command line: `main`, and a file for the commands on each subject."""
