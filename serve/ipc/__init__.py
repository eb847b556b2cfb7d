"""What the main process and the lane processes share: packets, memory and the stop word."""
