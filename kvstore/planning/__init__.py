"""Whether a cached prefix is loaded or computed: measured speeds, the plan, the meeting of both ends, a guard. Pure."""
