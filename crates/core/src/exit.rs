//! The end of a process.

use serde::{Deserialize, Serialize};

/// The status or the signal that a process ended with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// The status that the process ended itself with.
    Code(i32),
    /// The number of the signal that killed the process.
    Signal(i32),
}

impl Exit {
    /// Returns true for status 0.
    pub fn success(self) -> bool {
        self == Exit::Code(0)
    }

    /// Returns the code that a shell shows: the status, or 128 + signal.
    pub fn shell_code(self) -> u8 {
        match self {
            Exit::Code(code) => code as u8,
            Exit::Signal(signal) => (128 + signal) as u8,
        }
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Exit::Code(code) => write!(f, "exit status {code}"),
            Exit::Signal(signal) => write!(f, "killed by signal {signal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_shown_as_a_shell_does() {
        assert_eq!(Exit::Code(3).shell_code(), 3);
        assert_eq!(Exit::Signal(15).shell_code(), 143);
        assert_eq!(serde_json::to_string(&Exit::Signal(9)).unwrap(), r#"{"signal":9}"#);
    }
}
