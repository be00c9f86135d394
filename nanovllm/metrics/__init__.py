"""What a run did: throughput, and later density, transfer and memory."""
