"""The HTTP interface: OpenAI's routes, the token endpoint, and what an RL loop needs to steer an engine from afar."""
