"""What the child process can do: functions that take ``progress`` and plain data, and return plain data."""
