//! Requests to one server that concern no region, for users and scripts.

use super::connection::{Connection, Endpoint};
use super::link::{LinkError, wait};
use crate::server::pool::ServerReport;
use crate::store::StoreError;
use crate::wire::reply::Reply;
use crate::wire::request::Request;
use std::time::Duration;

/// The timeout of the connect and of each answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Returns a server's report on itself and its clients.
///
/// # Errors
/// If the server does not answer, or its answer cannot be parsed.
pub fn report(endpoint: &Endpoint) -> Result<ServerReport, StoreError> {
    ask(endpoint, &Request::Report, |reply| match reply {
        Reply::Report(json) => serde_json::from_slice(json).map_err(|error| error.to_string()),
        _ => Err("a reply that does not fit the request".into()),
    })
}

fn ask<T>(
    endpoint: &Endpoint,
    request: &Request<'_>,
    read: impl FnOnce(Reply<'_>) -> Result<T, String>,
) -> Result<T, StoreError> {
    let refused = |why| StoreError::Refused { server: endpoint.label.clone(), why };
    let unreachable = |source| StoreError::Unreachable { server: endpoint.label.clone(), source };
    let mut connection: Connection = endpoint.connect("pagetax", PATIENCE)?;
    connection.set_patience(PATIENCE).map_err(unreachable)?;
    let id = connection.send(request).map_err(unreachable)?;
    match wait(&mut connection, id) {
        Ok(reply) => read(reply).map_err(refused),
        Err(LinkError::Failed(failure)) => Err(refused(failure.to_string())),
        Err(LinkError::Broken(error)) => Err(unreachable(error)),
        Err(LinkError::Restarted | LinkError::NoRegion) => Err(refused("it was restarted".into())),
    }
}
