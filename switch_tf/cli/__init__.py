"""The command line: `main`, and a file for the commands of each subject."""
