"""State of a scheduler: tasks, plans, memory and progress of each device."""
