"""From an order to programs: merge backwards, insert the communication, emit one program per rank."""
