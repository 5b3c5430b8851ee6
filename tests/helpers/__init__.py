"""What several tests build, run and compare with."""
