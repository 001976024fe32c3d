//! What other programs read of a server over HTTP: `/health`, `/metrics`, `/report`.
//!
//! Nothing can be changed here, and no page can be read.

use super::metrics::Metrics;
use super::pool::Pool;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tiny_http::{Header, Method, Request, Response, Server};

/// Clients in a report.
const CLIENTS_MAX: usize = 10_000;

/// Answers until the process ends; the address that was bound.
///
/// # Errors
/// When the address cannot be bound.
pub fn start(
    address: SocketAddr,
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    started: Instant,
) -> io::Result<SocketAddr> {
    let server = Server::http(address).map_err(io::Error::other)?;
    let bound = server.server_addr().to_ip().unwrap_or(address);
    let answer = move || {
        for request in server.incoming_requests() {
            // Who asked has gone, if this fails.
            let _ = answer(request, &pool, &metrics, started);
        }
    };
    std::thread::Builder::new().name("pagetax-http".into()).spawn(answer)?;
    Ok(bound)
}

fn answer(request: Request, pool: &Pool, metrics: &Metrics, started: Instant) -> io::Result<()> {
    let uptime_ns = started.elapsed().as_nanos() as u64;
    let path = request.url().split('?').next().unwrap_or_default();
    let (status, kind, body) = match (request.method(), path) {
        (Method::Get, "/metrics") => {
            (200, "application/openmetrics-text; version=1.0.0; charset=utf-8", metrics.encode())
        }
        (Method::Get, "/health") if pool.is_draining() => (503, "text/plain", "draining\n".into()),
        (Method::Get, "/health") => (200, "text/plain", "ok\n".into()),
        (Method::Get, "/report") => {
            let report = serde_json::to_string(&pool.report(uptime_ns, CLIENTS_MAX));
            (200, "application/json", report.map_err(io::Error::other)? + "\n")
        }
        (Method::Get, _) => (404, "text/plain", "try /health, /metrics or /report\n".into()),
        _ => (405, "text/plain", "only GET\n".into()),
    };
    let mut response = Response::from_string(body).with_status_code(status);
    if let Ok(header) = Header::from_bytes("Content-Type", kind) {
        response.add_header(header);
    }
    request.respond(response)
}
