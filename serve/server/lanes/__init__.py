"""Lane processes as the main process handles them: started, told, heard, restarted, ended."""
