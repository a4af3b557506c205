"""The round loop, and what it records, saves and resumes."""
