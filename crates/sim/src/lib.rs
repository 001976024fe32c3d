//! Simulated machines.
