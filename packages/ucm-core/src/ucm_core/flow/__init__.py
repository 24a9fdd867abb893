"""How bytes move: tickets that say what became of a batch, and copies between engine memory and payloads."""
