"""Who calls, and what they may do: credentials, roles, tenants and the one decision on a call."""
