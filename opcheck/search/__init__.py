"""The search for inputs on which an operator is wrong: `--search`."""
