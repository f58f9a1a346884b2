"""A small unlike cluster made of one machine: slow links and slow devices that every op feels."""
