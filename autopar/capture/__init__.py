"""From a module and one call to a program, and what the program's operators compute."""
