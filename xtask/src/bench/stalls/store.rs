//! One run on a Valkey or Redis cluster of three masters: the same program, and a failure of one master.

use super::failure::{SERVERS, ServerFailure, WHOLE_PATIENCE, duration, play};
use super::program::RewritingProgram;
use crate::bench::engine::Engine;
use anyhow::{Context, Result, bail};
use pagetax_core::access::Rng;
use pagetax_host::sys::process::Signal;
use pagetax_remote::store::redis::{EngineOptions, RedisStore};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// The failures that a test can bring about in a cluster of others' servers.
pub const FAILURES: [ServerFailure; 3] =
    [ServerFailure::Killed, ServerFailure::Silent, ServerFailure::Restarted];

/// Runs it; what scripts want to know.
pub fn run(kind: ServerFailure, seed: u64) -> Result<Value> {
    let mut rng = Rng::new(!seed);
    let folder = tempfile::tempdir()?;
    let engine = Engine::start(folder.path())?;
    let mut engine = engine.context("neither valkey-server nor redis-server is installed")?;
    // Else no slot is served while one has no master.
    engine.set("cluster-require-full-coverage", "no")?;
    let copied = Arc::new(AtomicBool::new(false));
    let log = {
        let copied = copied.clone();
        move |line: &str| copied.store(line.contains("copied anew"), Ordering::Relaxed)
    };
    let options =
        EngineOptions { copies: 2, log: Some(Arc::new(log)), ..EngineOptions::new(&engine.url) };
    let mut program = RewritingProgram::fill(Arc::new(RedisStore::connect(options)?), seed)?;
    let (victim, during) = (rng.below(SERVERS as u64) as usize, duration(&mut rng));
    let is_whole = || kind == ServerFailure::Silent || copied.load(Ordering::Relaxed);
    let fail = || match kind {
        ServerFailure::Killed => {
            engine.kill(victim);
            thread::sleep(during);
            engine.start_again(victim)
        }
        ServerFailure::Restarted => {
            engine.kill(victim);
            engine.start_again(victim)
        }
        ServerFailure::Silent => {
            engine.signal(victim, Signal::STOP);
            thread::sleep(during);
            engine.signal(victim, Signal::CONT);
            Ok(())
        }
        _ => bail!("servers of others cannot fail like that"),
    };
    let (longest, oversleep) = play(&mut program, during + WHOLE_PATIENCE, fail, is_whole)?;
    program.check_all();
    Ok(json!({
        "kind": format!("{kind:?}"), "seed": seed, "engine": engine.name,
        "longest_stall_ns": longest.map(|stall| stall.as_nanos() as u64),
        "longest_oversleep_ns": oversleep.as_nanos() as u64,
        "page_ins": program.page_ins(),
        "wrong_pages": program.wrong_pages,
    }))
}
