"""The scheduler's rules: who is admitted, grouped, moved forward or given up."""
