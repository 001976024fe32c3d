//! The JSON documents of `pagetax servers` and `pagetax remote --simulate`.

use crate::pager::replacement::{PolicyCounts, PolicyName};
use crate::server::pool::ServerReport;
use pagetax_core::document::Document;
use serde::{Deserialize, Serialize};

/// The reports of some servers, read at about the same time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Servers {
    /// The servers, in the order of their names on the command line.
    pub servers: Vec<ServerAnswer>,
}

/// A server's report, or the reason why there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ServerAnswer {
    /// The address of the server, as it was named or announced.
    pub server: String,
    /// The report of the server, if it answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<ServerReport>,
    /// The reason why the server did not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Document for Servers {
    const KIND: &'static str = "servers";
}

/// The page-ins of a traced program with less resident memory than it touches, by replacement policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Replacement {
    /// The command of the trace.
    pub title: String,
    /// The distinct pages (4 KiB) of heap and anonymous mappings of the process that changed pages most.
    pub page_count: u64,
    /// The number of times that its threads went to another of these pages.
    pub access_count: u64,
    /// The resident memory that was asked about.
    pub resident_bytes: u64,
    /// The results with that much resident memory, and with other amounts, ascending.
    pub limits: Vec<ReplacementAtLimit>,
    /// The time of a page-in, measured on the store; absent if it could not be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_in: Option<PageInTime>,
    /// Sentences that qualify the results.
    pub notes: Vec<String>,
}

/// The results of all policies with so much resident memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReplacementAtLimit {
    /// The most resident memory.
    pub resident_bytes: u64,
    /// The counts of each policy.
    pub policies: Vec<PolicyResult>,
}

/// The counts of one policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyResult {
    /// The policy.
    pub policy: PolicyName,
    /// Its counts.
    #[serde(flatten)]
    pub counts: PolicyCounts,
}

/// The time of page-ins at random, one thread, fault included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PageInTime {
    /// The median of some groups of page-ins.
    pub median_ns: u64,
    /// The fastest group.
    pub low_ns: u64,
    /// The slowest group.
    pub high_ns: u64,
}

impl ReplacementAtLimit {
    /// Returns the counts of a policy.
    pub fn of(&self, policy: PolicyName) -> Option<PolicyCounts> {
        self.policies.iter().find(|result| result.policy == policy).map(|result| result.counts)
    }
}

impl Document for Replacement {
    const KIND: &'static str = "replacement";
}
