//! Requests of our own to a server under load, at a fixed rate.
//!
//! A load that waits for each answer sends nothing while its server stalls, so it counts the stall once
//! (coordinated omission). Here each request is due at a time of its own. If the last answer came after that
//! time, the latency counts from then, and else from the sending.

use hdrhistogram::Histogram;
use pagetax_core::load::LoadFigures;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The requests that a percentile needs for each one that exceeds it.
const REQUESTS_MIN: f64 = 1.0;
/// The longest latency, and the digits of one.
const LATENCY_NS_MAX: u64 = 3_600_000_000_000;
const DIGITS: u8 = 3;

/// A request, and its rate.
#[derive(Debug, Clone)]
pub struct ServerProbe {
    url: String,
    protocol: Protocol,
    rate_per_s: u32,
}

#[derive(Debug, Clone, Copy)]
enum Protocol {
    /// GET
    Http,
    /// PING
    Redis,
}

/// Sends a request, and waits for the answer.
type Ask = Box<dyn FnMut() -> Result<(), String>>;

impl ServerProbe {
    /// Parses a URL. `rate_per_s` is at least 1.
    ///
    /// # Errors
    /// A sentence with the forms.
    pub fn parse(url: &str, rate_per_s: u32) -> Result<ServerProbe, String> {
        let protocol = match url.split_once("://") {
            Some(("http", _)) => Protocol::Http,
            Some(("redis" | "rediss" | "redis+unix", _)) => {
                redis::Client::open(url).map_err(|error| error.to_string())?;
                Protocol::Redis
            }
            _ => {
                return Err("http://HOST:PORT/PATH, redis://HOST:PORT or redis+unix:///PATH".into());
            }
        };
        Ok(ServerProbe { url: url.into(), protocol, rate_per_s: rate_per_s.max(1) })
    }

    /// Sends requests until the channel has the end of the load. Requests that were due before it are sent.
    pub(super) fn run(&self, is_over: &Receiver<Instant>) -> Result<LoadFigures, String> {
        let mut ask = self.connect()?;
        let latencies = Histogram::<u64>::new_with_max(LATENCY_NS_MAX, DIGITS);
        let mut latencies = latencies.map_err(|error| error.to_string())?;
        let interval = Duration::from_secs(1) / self.rate_per_s;
        let (mut due, mut answered) = (Instant::now(), Instant::now());
        let (mut ended, mut slow_count) = (None, 0);
        loop {
            if ended.is_none() {
                ended = match is_over.recv_timeout(due.saturating_duration_since(Instant::now())) {
                    Ok(at) => Some(at),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err("the run was given up".into());
                    }
                };
            }
            if ended.is_some_and(|ended| due >= ended) {
                break;
            }
            let sent = Instant::now();
            let from = if answered > due { due } else { sent };
            ask()?;
            answered = Instant::now();
            slow_count += u64::from(answered - sent > interval);
            latencies.saturating_record((answered - from).as_nanos() as u64);
            due += interval;
        }
        if slow_count * 2 > latencies.len() {
            return Err(format!(
                "most answers take longer than 1/{} s, so requests queue up; name a lower --probe-rate",
                self.rate_per_s
            ));
        }
        Ok(figures(&latencies))
    }

    fn connect(&self) -> Result<Ask, String> {
        let url = self.url.clone();
        match self.protocol {
            Protocol::Http => {
                let config = ureq::Agent::config_builder().timeout_global(Some(PATIENCE));
                let agent: ureq::Agent = config.max_redirects(0).build().into();
                Ok(Box::new(move || {
                    let answer =
                        agent.get(&url).call().and_then(|mut a| a.body_mut().read_to_vec());
                    answer.map(drop).map_err(|error| format!("{url}: {error}"))
                }))
            }
            Protocol::Redis => {
                let failed = |error: redis::RedisError| error.to_string();
                let client = redis::Client::open(url).map_err(failed)?;
                let mut link = client.get_connection_with_timeout(PATIENCE).map_err(failed)?;
                link.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
                link.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
                Ok(Box::new(move || redis::cmd("PING").exec(&mut link).map_err(failed)))
            }
        }
    }
}

/// Returns the percentiles for which there are enough requests.
fn figures(latencies: &Histogram<u64>) -> LoadFigures {
    let count = latencies.len();
    let at = |quantile: f64| {
        let beyond = count as f64 * (1.0 - quantile);
        (beyond >= REQUESTS_MIN).then(|| latencies.value_at_quantile(quantile) as f64)
    };
    LoadFigures {
        p50_ns: at(0.5),
        p99_ns: at(0.99),
        p999_ns: at(0.999),
        request_count: Some(count),
        ..LoadFigures::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::mpsc::channel;

    /// Serves each request on one connection, with a wait before the answer with this index.
    fn server(stall: (usize, Duration), answer: &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut link, _) = listener.accept().unwrap();
            let mut request = [0; 1000];
            for index in 0.. {
                if link.read(&mut request).unwrap_or(0) == 0 {
                    return;
                }
                if index == stall.0 {
                    std::thread::sleep(stall.1);
                }
                link.write_all(answer.as_bytes()).unwrap();
            }
        });
        address
    }

    fn probed(url: &str, rate_per_s: u32, time: Duration) -> Result<LoadFigures, String> {
        let probe = ServerProbe::parse(url, rate_per_s).unwrap();
        let (over, is_over) = channel();
        let thread = std::thread::spawn(move || probe.run(&is_over));
        std::thread::sleep(time);
        // It may have failed before.
        let _ = over.send(Instant::now());
        thread.join().unwrap()
    }

    const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

    #[test]
    fn each_request_that_a_stall_delays_counts() {
        // 200 of 600 requests are due during the stall, and wait for 500 ms on average.
        let address = server((100, Duration::from_secs(1)), OK);
        let figures = probed(&format!("http://{address}/"), 200, Duration::from_secs(3)).unwrap();
        assert!((590..=601).contains(&figures.request_count.unwrap()), "{figures:?}");
        assert!(figures.p99_ns > Some(8e8), "{figures:?}");
        assert!(figures.p50_ns < Some(4e8), "{figures:?}");
        assert_eq!(figures.p999_ns, None, "600 requests are too few");
    }

    #[test]
    fn a_server_that_is_slower_than_the_rate_is_refused() {
        let slow = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = slow.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut link, _) = slow.accept().unwrap();
            let mut request = [0; 1000];
            while link.read(&mut request).unwrap_or(0) > 0 {
                std::thread::sleep(Duration::from_millis(20));
                link.write_all(OK.as_bytes()).unwrap();
            }
        });
        let time = Duration::from_millis(500);
        let why = probed(&format!("http://{address}/"), 200, time).unwrap_err();
        assert!(why.contains("lower --probe-rate"), "{why}");
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        let time = Duration::from_millis(200);
        let address = server((usize::MAX, time), "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n");
        let why = probed(&format!("http://{address}/"), 100, time).unwrap_err();
        assert!(why.contains("503"), "{why}");
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for scheme in ["http", "redis"] {
            let why = probed(&format!("{scheme}://{closed}/"), 100, time).unwrap_err();
            assert!(why.to_lowercase().contains("refused"), "{scheme}: {why}");
        }
        for wrong in ["127.0.0.1:80", "https://here/", "redis://"] {
            assert!(ServerProbe::parse(wrong, 1).is_err(), "{wrong}");
        }
    }
}
