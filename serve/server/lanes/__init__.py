"""Lane processes as the main process sees them: start, talk, end."""
