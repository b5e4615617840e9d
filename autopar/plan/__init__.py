"""The solver's answer as data: plan, stages, schedule, actions, and their JSON form."""
