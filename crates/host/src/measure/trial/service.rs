//! A run of a server under load: start, wait until it is ready, load it, and end it.
//!
//! Invariant: the load belongs to no counter of the run. A thread that is older than the counters starts it.

use super::server_probe::ServerProbe;
use super::{Outputs, Running, STOP_POLL, TrialError, system};
use crate::sys::signal::asked_to_stop;
use pagetax_core::load::{LoadFigures, Metric};
use regex_lite::Regex;
use rustix::process::Signal;
use std::io::Read;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the server and its load are looked at.
const LOOK: Duration = Duration::from_millis(10);
/// The time that a server has to end after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(10);
/// The event of the first run comes after this time.
const FIRST_EVENT: Duration = Duration::from_secs(1);
/// The most bytes of a load's output that are read.
const OUTPUT_MAX: u64 = 16 << 20;

/// A server's load.
#[derive(Debug, Clone)]
pub struct Service {
    /// The sign that the server is ready.
    pub ready: Ready,
    /// The longest time until it is ready.
    pub ready_limit: Duration,
    /// The line of a shell that loads it. Each run ends with it.
    pub load: String,
    /// The longest time of that line.
    pub load_limit: Duration,
    /// A line of a shell that runs in the middle of the load.
    pub event: Option<String>,
    /// The requests of our own beside the load; none if its latencies are those that the load prints.
    pub probe: Option<ServerProbe>,
    /// The figure of the load.
    pub metric: Metric,
    /// The length of the last load; none before the first.
    pub load_time: Option<Duration>,
}

/// A sign that a server is ready.
#[derive(Debug, Clone)]
pub enum Ready {
    /// It accepts connections at this port of this machine.
    Port(u16),
    /// It prints a line with a match.
    Output(Regex),
    /// This line of a shell succeeds.
    Command(String),
}

impl Ready {
    /// Parses a port, `output:REGEX` or `command:LINE`.
    ///
    /// # Errors
    /// A sentence with the forms.
    pub fn parse(word: &str) -> Result<Ready, String> {
        match word.split_once(':') {
            Some(("output", expression)) => {
                Regex::new(expression).map(Ready::Output).map_err(|error| error.to_string())
            }
            Some(("command", line)) => Ok(Ready::Command(line.into())),
            _ => word.parse().map(Ready::Port).map_err(|_| {
                "a port such as 6379, output:REGEX for a line that it prints, or command:LINE that succeeds".into()
            }),
        }
    }
}

/// Starts commands and threads from a thread that no counter follows.
pub(super) struct Starter(mpsc::Sender<Box<dyn FnOnce() + Send>>);

impl Starter {
    pub fn new() -> Starter {
        let (asked, starts) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        std::thread::spawn(move || starts.into_iter().for_each(|start| start()));
        Starter(asked)
    }

    fn start<T: Send + 'static>(
        &self,
        what: &'static str,
        start: impl FnOnce() -> std::io::Result<T> + Send + 'static,
    ) -> Result<T, TrialError> {
        let gone = || std::io::Error::other("the thread that starts loads has ended");
        let (tell, started) = mpsc::channel();
        let job = Box::new(move || {
            // Who asked waits for the answer.
            let _ = tell.send(start());
        });
        let asked = self.0.send(job).map_err(|_| gone());
        let started = asked.and_then(|()| started.recv().map_err(|_| gone())?);
        started.map_err(system(what))
    }

    fn shell(&self, line: &str, stdout: Stdio) -> Result<LoadProcess, TrialError> {
        let mut command = Command::new("sh");
        command.args(["-c", line]).stdin(Stdio::null()).stdout(stdout).stderr(Stdio::null());
        self.start("start a shell", move || command.spawn()).map(LoadProcess)
    }

    fn probe(&self, probe: &ServerProbe) -> Result<ProbeThread, TrialError> {
        let (over, is_over) = mpsc::channel();
        let probe = probe.clone();
        let run = move || probe.run(&is_over);
        let spawn = move || std::thread::Builder::new().name("server probe".into()).spawn(run);
        let thread = self.start("start a thread", spawn)?;
        Ok(ProbeThread { over, thread })
    }
}

/// The thread that sends our own requests. It ends soon after this is dropped.
struct ProbeThread {
    over: mpsc::Sender<Instant>,
    thread: JoinHandle<Result<LoadFigures, String>>,
}

impl ProbeThread {
    fn finish(self, ended: Instant) -> Result<LoadFigures, TrialError> {
        // A thread that has failed hears nothing.
        let _ = self.over.send(ended);
        let lost = |_| Err("its thread has ended".into());
        let figures = self.thread.join().unwrap_or_else(lost);
        figures.map_err(|why| TrialError::Service(format!("--probe: {why}")))
    }
}

/// A shell with its command. Dropping it ends the shell; its descendants end with the trial.
struct LoadProcess(Child);

impl Drop for LoadProcess {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(Some(_))) {
            // It may end by itself meanwhile.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

impl Service {
    /// Fails if something else has the port.
    pub(super) fn check_free(&self) -> Result<(), TrialError> {
        match self.ready {
            Ready::Port(port) if is_open(port) => Err(TrialError::Service(format!(
                "port {port} is in use before the server starts; end what has it, or name another"
            ))),
            _ => Ok(()),
        }
    }

    /// Loads a server that was started, and ends it.
    pub(super) fn run(
        &self,
        starter: &Starter,
        running: &mut Running<'_>,
        outputs: &Outputs,
    ) -> Result<(LoadFigures, Duration), TrialError> {
        self.wait_until_ready(starter, running, outputs)?;
        let begun = Instant::now();
        let probe = self.probe.as_ref().map(|probe| starter.probe(probe)).transpose()?;
        let output = self.load(starter, running, probe.as_ref())?;
        let took = begun.elapsed();
        let own = probe.map(|probe| probe.finish(begun + took)).transpose()?;
        end(running)?;
        let figures = self.metric.read(&output, own).map_err(TrialError::Service)?;
        Ok((figures, took))
    }

    fn wait_until_ready(
        &self,
        starter: &Starter,
        running: &mut Running<'_>,
        outputs: &Outputs,
    ) -> Result<(), TrialError> {
        let begun = Instant::now();
        while !self.is_ready(starter, outputs)? {
            check(running, "before it was ready")?;
            if begun.elapsed() > self.ready_limit {
                let text = format!(
                    "the server was not ready after {} s; see --ready and --ready-limit",
                    self.ready_limit.as_secs()
                );
                return Err(TrialError::Service(text));
            }
        }
        Ok(())
    }

    fn is_ready(&self, starter: &Starter, outputs: &Outputs) -> Result<bool, TrialError> {
        match &self.ready {
            Ready::Port(port) => Ok(is_open(*port)),
            Ready::Output(pattern) => {
                let read = |path: &PathBuf| std::fs::read(path).unwrap_or_default();
                let texts = [&outputs.stdout, &outputs.stderr].into_iter().flatten().map(read);
                Ok(texts.into_iter().any(|text| pattern.is_match(&String::from_utf8_lossy(&text))))
            }
            Ready::Command(line) => {
                let mut shell = starter.shell(line, Stdio::null())?;
                Ok(shell.0.wait().map_err(system("wait for --ready"))?.success())
            }
        }
    }

    /// Returns what the load printed. It is cut off if the probe fails.
    fn load(
        &self,
        starter: &Starter,
        running: &mut Running<'_>,
        probe: Option<&ProbeThread>,
    ) -> Result<String, TrialError> {
        let begun = Instant::now();
        let mut load = starter.shell(&format!("exec 2>&1\n{}", self.load), Stdio::piped())?;
        let printed = load.0.stdout.take();
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // What was read until an error is enough.
            let _ = printed.map(|out| out.take(OUTPUT_MAX).read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let event_at = self.load_time.map_or(FIRST_EVENT, |time| time / 2);
        let mut event = self.event.as_ref();
        let mut events = Vec::new();
        let status = loop {
            if let Some(status) = load.0.try_wait().map_err(system("wait for the load"))? {
                break status;
            }
            check(running, "while it was loaded")?;
            if probe.is_some_and(|probe| probe.thread.is_finished()) {
                return Ok(String::new());
            }
            if let Some(line) = event.take_if(|_| begun.elapsed() >= event_at) {
                events.push(starter.shell(line, Stdio::null())?);
            }
            if begun.elapsed() > self.load_limit {
                let text = format!(
                    "the load did not end in {} s; give it less to do, or more time (--load-limit)",
                    self.load_limit.as_secs()
                );
                return Err(TrialError::Service(text));
            }
        };
        drop(load);
        let output = reader.join().unwrap_or_default();
        if !status.success() {
            let last = output
                .lines()
                .rev()
                .find(|line| !line.trim().is_empty())
                .unwrap_or("it printed nothing");
            return Err(TrialError::Service(format!("the load failed ({status}): {last}")));
        }
        Ok(output)
    }
}

/// Waits a moment. Fails if the server has ended, or if we are asked to stop.
fn check(running: &mut Running<'_>, when: &str) -> Result<(), TrialError> {
    if asked_to_stop() {
        return Err(TrialError::Interrupted);
    }
    match running.child.ends_within(LOOK).map_err(system("watch for the server's end"))? {
        true => Err(TrialError::Service(format!(
            "the server ended {when}; --keep-output DIR keeps what it printed"
        ))),
        false => Ok(()),
    }
}

/// Ends the server as an operator would.
fn end(running: &mut Running<'_>) -> Result<(), TrialError> {
    for (signal, patience) in [(Signal::TERM, GRACE), (Signal::KILL, GRACE)] {
        // It may end by itself meanwhile.
        let _ = rustix::process::kill_process(running.child.pid(), signal);
        let begun = Instant::now();
        while begun.elapsed() < patience {
            if running.child.ends_within(STOP_POLL).map_err(system("watch for the server's end"))? {
                return Ok(());
            }
        }
    }
    Err(TrialError::Service("the server cannot be ended".into()))
}

fn is_open(port: u16) -> bool {
    let hosts: [SocketAddr; 2] =
        [(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()];
    hosts.iter().any(|host| TcpStream::connect_timeout(host, Duration::from_millis(200)).is_ok())
}
