"""Who asks for blocks and who holds them: sessions, grants, waits and seals. Pure."""
