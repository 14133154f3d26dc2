"""Files written whole, appended to line by line, locked, and tidied up; standard output and standard error."""
