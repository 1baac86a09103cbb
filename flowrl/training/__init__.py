"""The trainer and what it keeps: arguments, prompts, batch plan, weight copies, checkpoints, monitors, logs."""
