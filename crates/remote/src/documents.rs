//! The JSON document of `pagetax servers`.

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
