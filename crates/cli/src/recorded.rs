//! Recorded programs, as several subcommands take them: a command that is recorded now, or a trace.

use crate::output::documents::{Output, Outputs};
use crate::output::progress::Progress;
use crate::{exit, output};
use anyhow::{Context, Result, anyhow, bail};
use pagetax_core::exit::Exit;
use pagetax_core::units::Nanos;
use pagetax_host::launch::program::Program;
use pagetax_host::sys::signal::{StopSignals, asked_to_stop};
use pagetax_recorder::engine::{Engine, EngineError, EngineKind};
use pagetax_recorder::pages::{PageObserver, RecordAdapter, filters};
use pagetax_recorder::session::{self, RecordOptions, SessionOutcome, Streams};
use pagetax_recorder::stream::Consumer;
use pagetax_recorder::trace::{Trace, is_trace};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The recorder, as `--engine` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineChoice {
    /// A Valgrind tool: fastest on real programs, one thread at a time
    Valgrind,
    /// A plugin of QEMU's user mode: other instruction sets, threads in parallel
    Qemu,
    /// Copies of the program's own code, for --sample only: fastest, but for code made at run time
    Native,
}

/// The program or the trace that a subcommand observes.
#[derive(Debug, Clone, clap::Args)]
pub struct Source {
    /// Follow children, and what they execute
    #[arg(short = 'f', long)]
    pub follow: bool,

    /// The recorder that runs the program [default: valgrind, where it can]
    #[arg(long, value_enum)]
    pub engine: Option<EngineChoice>,

    /// A trace (`pagetax record`), in place of a command
    #[arg(value_name = "TRACE", conflicts_with = "command")]
    pub trace: Option<PathBuf>,

    /// The command and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// A source that is ready.
pub enum Recorded {
    /// A command that is to run.
    Live(Box<EngineCommand>),
    /// A trace on disk.
    Trace(Box<Trace>),
}

/// A command under the engine that fits.
pub struct EngineCommand {
    /// The engine that records it.
    pub engine: Engine,
    /// The program that the command starts.
    pub program: Program,
    /// Variables that are added to its environment.
    pub environment: Vec<(&'static str, OsString)>,
    /// True to learn which unused pages are all zeros.
    pub zeros: bool,
    argv: Vec<OsString>,
    follow: bool,
    streams: Streams,
}

/// Returns the streams of a program beside documents that may take stdout.
pub fn streams(documents_take_stdout: bool) -> Streams {
    if documents_take_stdout { Streams::StdoutToStderr } else { Streams::Inherited }
}

/// The end of an observation.
pub struct SourceOutcome {
    /// The exit code: the program's own.
    pub code: u8,
    /// Limits of the numbers, for the reader.
    pub notes: Vec<String>,
}

impl Source {
    /// Prepares all that can fail before the program starts. If documents take stdout, the program's output
    /// goes to stderr. A sampled command has the native engine, if none is asked for and that one can run it.
    pub fn open<D: Output>(&self, documents: &Outputs<D>, sample: bool) -> Result<Recorded> {
        match (&self.trace, self.command.first()) {
            (Some(path), _) => Ok(Recorded::Trace(Box::new(open_trace(path)?))),
            (None, Some(_)) => {
                let native = Source { engine: Some(EngineChoice::Native), ..self.clone() };
                let native = || native.prepare(true).ok();
                let command = match (sample, self.engine) {
                    (true, None) => native().map_or_else(|| self.prepare(true), Ok)?,
                    _ => self.prepare(sample)?,
                };
                let streams = streams(documents.takes_stdout());
                Ok(Recorded::Live(Box::new(EngineCommand { streams, ..command })))
            }
            (None, None) => {
                bail!("nothing to look at\n  hint: name a command after --, or a trace")
            }
        }
    }

    /// Prepares the command, for subcommands that take no trace.
    pub fn command(&self) -> Result<EngineCommand> {
        self.prepare(false)
    }

    fn prepare(&self, sample: bool) -> Result<EngineCommand> {
        let name = self.command.first().context("no command\n  hint: name one after --")?;
        let (engine, program) = engine_for(name, self.engine, self.follow, sample)?;
        let (argv, follow) = (self.command.clone(), self.follow);
        let (environment, streams) = (Vec::new(), Streams::Inherited);
        Ok(EngineCommand { engine, program, environment, zeros: false, argv, follow, streams })
    }
}

/// Returns the engine asked for or the best one for a command, and the program that the command names.
pub fn engine_for(
    name: &OsStr,
    asked: Option<EngineChoice>,
    follow: bool,
    sample: bool,
) -> Result<(Engine, Program)> {
    let program =
        Program::find(name).map_err(|error| exit::with(exit::of_program(&error), error))?;
    let asked = asked.map(|engine| match engine {
        EngineChoice::Valgrind => EngineKind::Valgrind,
        EngineChoice::Qemu => EngineKind::Qemu,
        EngineChoice::Native => EngineKind::Native,
    });
    let engine = Engine::choose(&program, asked).map_err(engine_error)?;
    output::detail(|| format!("recording {} by {:?}", name.display(), engine.kind));
    if engine.kind == EngineKind::Native && !sample {
        let what = "the native engine records samples only";
        return Err(unmet(format!(
            "{what}\n  hint: --sample with trapstat or whatif, or --engine valgrind for all of the program"
        )));
    }
    if sample && engine.kind == EngineKind::Qemu {
        let what = format!("the {} engine records all, it cannot sample", engine.kind);
        return Err(unmet(format!("{what}\n  hint: leave --sample out")));
    }
    if follow && engine.kind == EngineKind::Native {
        let what = "the native engine does not follow forks and execs";
        return Err(unmet(format!("{what}\n  hint: --engine valgrind, or no --follow")));
    }
    Ok((engine, program))
}

fn engine_error(error: EngineError) -> anyhow::Error {
    let code = match error {
        EngineError::SetId(_) => exit::WRAPPER_FAILED,
        EngineError::NoProgram(_) => exit::NOT_EXECUTABLE,
        EngineError::Build(_) | EngineError::Architecture { .. } | EngineError::Native(_) => {
            exit::UNMET
        }
    };
    exit::with(code, error)
}

fn unmet(message: String) -> anyhow::Error {
    exit::with(exit::UNMET, anyhow!(message))
}

/// Opens a trace, and notes damage.
pub fn open_trace(path: &Path) -> Result<Trace> {
    if path.is_file() && !is_trace(path) {
        bail!(
            "{} is no trace\n  hint: make one with `pagetax record -o FILE.ptt -- COMMAND`; a \
             command goes after --",
            path.display()
        );
    }
    let trace = Trace::open(path)?;
    trace.notes.iter().for_each(|note| output::note(note));
    if trace.blocks() == 0 {
        bail!(
            "nothing in {} is whole: it has no block\n  hint: copy the file again, or record it again",
            path.display()
        );
    }
    Ok(trace)
}

impl EngineCommand {
    /// Prepares a command that nobody talks to: it reads a file or nothing, and its output is discarded.
    pub fn apart(argv: &[OsString], stdin: Option<PathBuf>, follow: bool) -> Result<EngineCommand> {
        let name = argv.first().context("no command")?;
        let (engine, program) = engine_for(name, None, follow, false)?;
        Ok(EngineCommand {
            engine,
            program,
            argv: argv.to_vec(),
            follow,
            streams: Streams::Apart(stdin),
            environment: Vec::new(),
            zeros: false,
        })
    }

    /// Returns the words of the command line.
    pub fn words(&self) -> Vec<String> {
        self.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    /// Runs it, and tells its pages.
    pub fn observe<P: PageObserver>(&self, what: &str, pages: P) -> Result<(P, SourceOutcome)> {
        let mut live = RecordAdapter::new(pages, &self.program);
        let ended = self.record(what, &mut live, false)?;
        let outcome = SourceOutcome { code: ended.exit.shell_code(), notes: notes(&ended) };
        Ok((live.pages, outcome))
    }

    /// Runs it, and shows its records or a sample of them to a consumer. Ctrl-C ends the program, not us, so
    /// that what was seen is kept.
    pub fn record<C: Consumer>(
        &self,
        what: &str,
        consumer: &mut C,
        sample: bool,
    ) -> Result<SessionOutcome> {
        let _stop =
            StopSignals::watch().context("cannot watch for Ctrl-C; this is not expected")?;
        let options = RecordOptions {
            engine: &self.engine,
            argv: &self.argv,
            follow: self.follow,
            sample,
            zeros: self.zeros,
            filters: filters(),
            streams: self.streams.clone(),
            environment: &self.environment,
        };
        let mut progress = match self.streams {
            Streams::Apart(_) => Progress::start(what),
            _ => Progress::beside_program(what, self.streams == Streams::StdoutToStderr),
        };
        Ok(session::run(&options, consumer, |_, records| progress.recorded(records))?)
    }
}

/// Returns the limits of what was seen.
pub fn notes(ended: &SessionOutcome) -> Vec<String> {
    let mut notes = vec![format!(
        "{} under the recorder, {} records",
        Nanos(ended.wall_ns),
        ended.record_count
    )];
    if ended.unrecorded_count > 0 {
        notes.push(format!(
            "{} processes or threads were not recorded: more than 64 ran at a time",
            ended.unrecorded_count
        ));
    }
    if let Exit::Signal(signal) = ended.exit {
        notes
            .push(format!("the program was ended by signal {signal}; what it did before was seen"));
    }
    notes.extend(ended.log.lines().take(20).map(|line| format!("recorder: {line}")));
    notes
}

impl Recorded {
    /// Shows all pages of the source to an observer.
    pub fn observe<P: PageObserver>(&self, what: &str, mut pages: P) -> Result<(P, SourceOutcome)> {
        match self {
            Recorded::Live(command) => command.observe(what, pages),
            Recorded::Trace(trace) => {
                let _stop = StopSignals::watch()
                    .context("cannot watch for Ctrl-C; this is not expected")?;
                let mut progress = Progress::start(what);
                let ended = trace.replay(&mut pages, |done| {
                    progress.update(done);
                    !asked_to_stop()
                });
                drop(progress);
                let mut notes = Vec::new();
                if let Err(error) = ended {
                    notes.push(format!("only what is before it was read: {error}"));
                }
                let code = if asked_to_stop() { exit::INTERRUPTED } else { 0 };
                Ok((pages, SourceOutcome { code, notes }))
            }
        }
    }

    /// Describes it in a few words.
    pub fn title(&self) -> String {
        match self {
            Recorded::Live(command) => command.words().join(" "),
            Recorded::Trace(trace) => trace.head.title(),
        }
    }
}
