//! `pagetax cc`, `c++`, `rustc`: a compiler, with page sizes for what it links. The program then
//! carries them itself: an object with a constructor that advises heap and stack.
//!
//! The object is made of libpagetax_interpose.a, whose names are hidden but for the functions that have
//! to stand before the C library's; so it goes into programs of any language, Rust's too.

use crate::exit;
use anyhow::{Context, Result, anyhow, bail};
use pagetax_core::page_size::PageSizeRequest;
use pagetax_core::units::PageSize;
use pagetax_host::launch::libraries;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const EXAMPLES: &str = "\
Examples:
  pagetax cc -xpagesize=2M -O2 -o server server.c      heap and stack on 2M pages, from then on
  pagetax cc -xpagesize_heap=2M -o server *.o          the heap alone
  CXX=clang++ pagetax c++ -xpagesize=2M main.cc        any compiler that links by GNU options
  pagetax rustc -xpagesize=2M main.rs";

/// The symbols that the object exports; all others in it are hidden.
const GLOBAL: &[&str] = &[
    "pagetax_advise",
    "malloc",
    "calloc",
    "realloc",
    "memalign",
    "aligned_alloc",
    "posix_memalign",
    "mmap",
    "mmap64",
];

const ARCHIVE: &str = "libpagetax_interpose.a";

/// Compile and link C; the program puts its heap and stack on large pages by itself
///
/// Options that begin with -xpagesize are ours: -xpagesize=SIZE, -xpagesize_heap=SIZE and
/// -xpagesize_stack=SIZE, with a size such as 2M, or `default`. All others go to the compiler, $CC or
/// cc. No library is needed when the program runs. Its exit code is the compiler's.
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// -xpagesize options, and the compiler's own arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGS"
    )]
    args: Vec<OsString>,
}

/// A program that compiles and links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// `$CC`, or cc.
    C,
    /// `$CXX`, or c++.
    Cxx,
    /// `$RUSTC`, or rustc.
    Rust,
}

impl Driver {
    fn program(self) -> OsString {
        let (variable, program) = match self {
            Driver::C => ("CC", "cc"),
            Driver::Cxx => ("CXX", "c++"),
            Driver::Rust => ("RUSTC", "rustc"),
        };
        std::env::var_os(variable).filter(|value| !value.is_empty()).unwrap_or(program.into())
    }

    /// Options after which a C compiler does not link.
    fn links(self, args: &[OsString]) -> bool {
        const NO_LINK: [&str; 7] = ["-c", "-S", "-E", "-M", "-MM", "-fsyntax-only", "-r"];
        self == Driver::Rust || !args.iter().any(|arg| NO_LINK.iter().any(|no| arg == no))
    }
}

/// Page sizes in bytes; 0: as the system likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Sizes {
    heap: u64,
    stack: u64,
}

/// Runs `pagetax cc ARGS…`.
pub fn run(args: Args, driver: Driver) -> Result<ExitCode> {
    let (sizes, mut rest) = split(args.args)?;
    // Kept until the compiler is done.
    let directory;
    if sizes != Sizes::default() && driver.links(&rest) {
        directory = tempfile::tempdir().context("cannot make a temporary directory; set TMPDIR")?;
        for object in objects(sizes, directory.path())? {
            let object = object.into_os_string();
            match driver {
                Driver::Rust => {
                    let mut option = OsString::from("-Clink-arg=");
                    option.push(object);
                    rest.push(option);
                }
                _ => rest.push(object),
            }
        }
    }
    let program = driver.program();
    let status = Command::new(&program).args(&rest).status().map_err(|error| {
        let code = match error.kind() {
            std::io::ErrorKind::NotFound => exit::NOT_FOUND,
            _ => exit::NOT_EXECUTABLE,
        };
        let remedy = "install a compiler, or name one by CC, CXX or RUSTC";
        exit::with(code, anyhow!("cannot run {}: {error}\n  remedy: {remedy}", program.display()))
    })?;
    Ok(u8::try_from(status.code().unwrap_or(125)).unwrap_or(exit::WRAPPER_FAILED).into())
}

/// Separates pagetax's options from the compiler's.
fn split(args: Vec<OsString>) -> Result<(Sizes, Vec<OsString>)> {
    let (mut sizes, mut rest) = (Sizes::default(), Vec::new());
    for arg in args {
        let Some(option) = arg.to_str().and_then(|arg| arg.strip_prefix("-xpagesize")) else {
            rest.push(arg);
            continue;
        };
        match option.split_once('=') {
            Some(("", size)) => (sizes.heap, sizes.stack) = (bytes(size)?, bytes(size)?),
            Some(("_heap", size)) => sizes.heap = bytes(size)?,
            Some(("_stack", size)) => sizes.stack = bytes(size)?,
            _ => bail!(
                "{} is no option\n  remedy: -xpagesize=SIZE, -xpagesize_heap=SIZE or \
                 -xpagesize_stack=SIZE",
                arg.display()
            ),
        }
    }
    Ok((sizes, rest))
}

fn bytes(size: &str) -> Result<u64> {
    let request: PageSizeRequest = size.parse()?;
    if request.hugetlb().is_some() {
        bail!(
            "{size}: a program takes no pages of a pool\n  remedy: pagetax ppgsz -F -o heap={size}"
        );
    }
    let base = PageSize::new(rustix::param::page_size() as u64)?;
    Ok(request.size(base).map_or(0, PageSize::bytes))
}

/// Makes the object with the constructor for these sizes, and the object that it calls.
fn objects(sizes: Sizes, directory: &Path) -> Result<[PathBuf; 2]> {
    let path = |name: &str| directory.join(name);
    let (source, constructor) = (path("pagetax_sizes.c"), path("pagetax_sizes.o"));
    let (advice, names) = (path("pagetax_interpose.o"), path("names"));
    let text = format!(
        "void pagetax_advise(unsigned long, unsigned long);\n\
         __attribute__((constructor)) static void sizes(void) {{ pagetax_advise({}UL, {}UL); }}\n",
        sizes.heap, sizes.stack
    );
    std::fs::write(&source, text).context("cannot write to TMPDIR")?;
    std::fs::write(&names, GLOBAL.join("\n") + "\n").context("cannot write to TMPDIR")?;
    let cc = Driver::C.program();
    tool(
        &cc,
        &[
            "-O1".as_ref(),
            "-fPIC".as_ref(),
            "-c".as_ref(),
            "-o".as_ref(),
            constructor.as_os_str(),
            source.as_os_str(),
        ],
    )?;
    let archive = libraries::find(ARCHIVE)?;
    let wanted = GLOBAL.iter().flat_map(|name| ["-u", name]).map(OsStr::new);
    let partial = ["-r", "--gc-sections", "--force-group-allocation", "-o"].map(OsStr::new);
    let link: Vec<&OsStr> = partial
        .into_iter()
        .chain([advice.as_os_str()])
        .chain(wanted)
        .chain([archive.as_os_str()])
        .collect();
    tool("ld".as_ref(), &link)?;
    let mut keep = OsString::from("--keep-global-symbols=");
    keep.push(&names);
    tool("objcopy".as_ref(), &[keep.as_ref(), advice.as_os_str()])?;
    Ok([constructor, advice])
}

fn tool(program: &OsStr, args: &[&OsStr]) -> Result<()> {
    let output = Command::new(program).args(args).output().with_context(|| {
        format!("cannot run {}\n  remedy: install a C compiler and binutils", program.display())
    })?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{} failed: {}", program.display(), errors.trim_end());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_text(args: &str) -> Result<(Sizes, Vec<OsString>)> {
        split(args.split(' ').map(OsString::from).collect())
    }

    #[test]
    fn our_options_are_taken_out() {
        let (sizes, rest) = split_text("-xpagesize=2M -O2 -xpagesize_stack=64K a.c").unwrap();
        assert_eq!(sizes, Sizes { heap: 2 << 20, stack: 64 << 10 });
        assert_eq!(rest, ["-O2", "a.c"]);
        let (sizes, _) = split_text("-xpagesize=2M -xpagesize_heap=default x.o").unwrap();
        assert_eq!(sizes, Sizes { heap: 0, stack: 2 << 20 });
    }

    #[test]
    fn mistakes_have_a_remedy() {
        for bad in ["-xpagesize", "-xpagesize_text=2M", "-xpagesizes=2M"] {
            assert!(split_text(bad).unwrap_err().to_string().contains("remedy"), "{bad}");
        }
        assert!(split_text("-xpagesize=3M").is_err());
    }

    #[test]
    fn objects_are_for_linking_only() {
        let args = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert!(Driver::C.links(&args("-o x x.c")));
        assert!(!Driver::C.links(&args("-c x.c")));
        assert!(!Driver::Cxx.links(&args("-MM x.cc")));
    }
}
