"""How transactions end, how they ended, and what makes sure that every topic and subscription knows of it."""
