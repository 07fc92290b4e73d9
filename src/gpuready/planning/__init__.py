"""Pure decisions: what is declared, what the server is and what the model is, made into a plan."""
