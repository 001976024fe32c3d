//! `pagetax build -- cc …`: a compiler, with page sizes for what it links. The program then
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
  pagetax build -- cc -xpagesize=2M -O2 -o server server.c   heap and stack on 2M pages, from then on
  pagetax build -- cc -xpagesize_heap=2M -o server *.o       the heap alone
  pagetax build -- clang++ -xpagesize=2M main.cc             any compiler that links by GNU options
  pagetax build -- rustc -xpagesize=2M main.rs
  make CC=\"pagetax build -- cc -xpagesize=2M\"                a whole project";

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

/// Compile and link a program that puts its heap and stack on large pages by itself
///
/// Options that begin with -xpagesize are ours: -xpagesize=SIZE, -xpagesize_heap=SIZE and
/// -xpagesize_stack=SIZE, with a size such as 2M, or `default`. All others go to the compiler: a C or C++
/// compiler that links by GNU options, or rustc. No library is needed when the program runs. The exit code
/// is the compiler's.
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// The compiler and its arguments, -xpagesize options among them
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_names = ["COMPILER", "ARGS"]
    )]
    command: Vec<OsString>,
}

/// The options of a compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Language {
    /// Those of GCC.
    C,
    /// Those of rustc.
    Rust,
}

impl Language {
    /// Returns the language of a compiler: Rust for rustc, also with a version behind its name.
    fn of(compiler: &OsStr) -> Self {
        let name = Path::new(compiler).file_name().unwrap_or(compiler).to_string_lossy();
        if name.starts_with("rustc") { Language::Rust } else { Language::C }
    }

    /// Returns true if the compiler links: a C compiler has options that stop it before.
    fn links(self, args: &[OsString]) -> bool {
        const NO_LINK: [&str; 7] = ["-c", "-S", "-E", "-M", "-MM", "-fsyntax-only", "-r"];
        self == Language::Rust || !args.iter().any(|arg| NO_LINK.iter().any(|no| arg == no))
    }
}

/// Page sizes in bytes; 0: as the system likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Sizes {
    heap: u64,
    stack: u64,
}

/// Runs `pagetax build -- COMPILER ARGS…`.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut words = args.command.into_iter();
    let compiler = words.next().context("no compiler\n  hint: name one: pagetax build -- cc …")?;
    let (sizes, mut rest) = split(words)?;
    let language = Language::of(&compiler);
    // Kept until the compiler is done.
    let directory;
    if sizes != Sizes::default() && language.links(&rest) {
        directory = tempfile::tempdir().context("cannot make a temporary directory; set TMPDIR")?;
        // rustc links by cc, too.
        let cc = if language == Language::C { &*compiler } else { OsStr::new("cc") };
        for object in objects(cc, sizes, directory.path())? {
            let mut option = OsString::from(match language {
                Language::Rust => "-Clink-arg=",
                Language::C => "",
            });
            option.push(object);
            rest.push(option);
        }
    }
    let status = Command::new(&compiler).args(&rest).status().map_err(|error| {
        let code = match error.kind() {
            std::io::ErrorKind::NotFound => exit::NOT_FOUND,
            _ => exit::NOT_EXECUTABLE,
        };
        let remedy = "name an installed compiler: pagetax build -- cc …";
        exit::with(code, anyhow!("cannot run {}: {error}\n  hint: {remedy}", compiler.display()))
    })?;
    Ok(u8::try_from(status.code().unwrap_or(125)).unwrap_or(exit::WRAPPER_FAILED).into())
}

/// Separates pagetax's options from the compiler's.
fn split(args: impl Iterator<Item = OsString>) -> Result<(Sizes, Vec<OsString>)> {
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
                "{} is no option\n  hint: -xpagesize=SIZE, -xpagesize_heap=SIZE or \
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
            "{size}: a program takes no pages of a pool\n  hint: pagetax ppgsz -F -o heap={size}"
        );
    }
    let base = PageSize::new(rustix::param::page_size() as u64)?;
    Ok(request.size(base).map_or(0, PageSize::bytes))
}

/// Makes the object with the constructor for these sizes, and the object that it calls.
fn objects(cc: &OsStr, sizes: Sizes, directory: &Path) -> Result<[PathBuf; 2]> {
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
    tool(
        cc,
        &[
            "-xc".as_ref(),
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
        format!("cannot run {}\n  hint: install a C compiler and binutils", program.display())
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
        split(args.split(' ').map(OsString::from))
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
            assert!(split_text(bad).unwrap_err().to_string().contains("hint:"), "{bad}");
        }
        assert!(split_text("-xpagesize=3M").is_err());
    }

    #[test]
    fn objects_are_for_linking_only() {
        let args = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert!(Language::C.links(&args("-o x x.c")));
        assert!(!Language::C.links(&args("-c x.c")));
        assert!(!Language::C.links(&args("-MM x.cc")));
        assert!(Language::Rust.links(&args("-c x.rs")));
    }

    #[test]
    fn rustc_is_known_by_its_file_name() {
        assert_eq!(Language::of("/opt/rust/bin/rustc".as_ref()), Language::Rust);
        assert_eq!(Language::of("clang++-19".as_ref()), Language::C);
    }
}
