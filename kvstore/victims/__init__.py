"""What leaves when room is needed, and what must not: policies, tenants' shares, pins and hints. Pure."""
