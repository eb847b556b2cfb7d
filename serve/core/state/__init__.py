"""What the scheduler knows: tasks, plans, memory and progress of each device."""
