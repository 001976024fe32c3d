//! Findings about features of the machine, as `doctor` reports them.
//!
//! Invariant: a feature that does not work comes with the command that would enable it, or with the reason
//! why no command can.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The state of a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// All of it was tried, and works.
    Works,
    /// Only a part of it works.
    Limited,
    /// None of it works.
    NotHere,
}

impl std::fmt::Display for Standing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Standing::Works => "works",
            Standing::Limited => "limited",
            Standing::NotHere => "not here",
        })
    }
}

/// The finding about one feature.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Finding {
    /// The feature's id: stable, in snake_case.
    pub id: Cow<'static, str>,
    /// The feature's use, in a few words.
    pub what: Cow<'static, str>,
    /// The state of the feature.
    pub standing: Standing,
    /// The observation behind the state.
    pub detail: String,
    /// The command that would enable more of it; `None` if all of it works or no command would help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable: Option<String>,
}

/// A feature's name and use, from which findings are made.
#[derive(Debug, Clone, Copy)]
pub struct Feature(pub &'static str, pub &'static str);

impl Feature {
    /// Returns the finding that all of it works.
    pub fn works(self, detail: impl Into<String>) -> Finding {
        self.finding(Standing::Works, detail, None)
    }

    /// Returns the finding that a part of it works, and the command for the rest.
    pub fn limited(self, detail: impl Into<String>, enable: impl Into<String>) -> Finding {
        self.finding(Standing::Limited, detail, Some(enable.into()))
    }

    /// Returns the finding that it does not work, and the command that would enable it.
    pub fn not_here(self, detail: impl Into<String>, enable: impl Into<String>) -> Finding {
        self.finding(Standing::NotHere, detail, Some(enable.into()))
    }

    /// Returns a finding that no command can change; the detail shows why.
    pub fn never_here(self, detail: impl Into<String>) -> Finding {
        self.finding(Standing::NotHere, detail, None)
    }

    /// Returns the finding of this state, with a command where one would help.
    pub fn finding(
        self,
        standing: Standing,
        detail: impl Into<String>,
        enable: Option<String>,
    ) -> Finding {
        Finding { id: self.0.into(), what: self.1.into(), standing, detail: detail.into(), enable }
    }
}
