//! The real Linux machine.
