"""The command line: `main`, and a file for each subject."""
