"""What the live page shows: buckets of time in the database, their writer and their readers."""
