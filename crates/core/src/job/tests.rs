use super::*;
use crate::machine::{MachineKind, MachineSpec};
use crate::plan::*;
use crate::quantity::Params;
use crate::units::{Bytes, Nanos, PageSize};

fn host() -> MachineSpec {
    MachineSpec {
        name: "host".into(),
        kind: MachineKind::Host,
        validated_jobs: Vec::new(),
        memory: Bytes(8 << 30),
        base_page: PageSize::K4,
        page_sizes: vec![PageSize::K4, PageSize::M2],
        cpus: 2,
        job_params: Default::default(),
    }
}

fn builtin(name: &str, set: &[(&str, &str)]) -> Result<Plan, JobError> {
    let overrides: Params = set.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    Job::builtin(name).unwrap().resolve(&overrides, &host(), None)
}

const SMALL: &str = r#"
name = "small"
[params]
size = "1M"
[[region]]
name = "heap"
size = "$size"
[[phase]]
name = "go"
ops = [{ touch = "heap" }]
"#;

fn resolve(text: &str) -> Result<Plan, JobError> {
    Job::parse(text, "j.toml")?.resolve(&Params::new(), &host(), None)
}

/// Replaces a text in the small job and returns the error.
fn mistake(from: &str, to: &str) -> String {
    assert!(SMALL.contains(from));
    resolve(&SMALL.replace(from, to)).unwrap_err().to_string()
}

#[test]
fn vmtest_is_irlams_program() {
    let plan = builtin("vmtest", &[]).unwrap();
    let sweep = &plan.phases[1];
    assert_eq!((sweep.client_kind, sweep.clients, sweep.repeat), (ClientKind::Processes, 16, 5000));
    assert_eq!(sweep.parent_wake, Some(Nanos(40_000_000)));
    let Op::Touch(touch) = &sweep.ops[0] else { panic!() };
    assert_eq!((touch.count, touch.access), (512, Access::Read));
    assert_eq!(
        builtin("vmtest", &[("size", "20M"), ("process_size", "4M")]).unwrap().phases[1].clients,
        5
    );
}

#[test]
fn mlock_cycle_keeps_a_window() {
    let plan = builtin("mlock-cycle", &[("files", "3"), ("file_size", "427683520")]).unwrap();
    let (lock, id) = (1 << 20, RegionId);
    let locked = |region| Op::Lock { region, chunk_bytes: lock };
    assert_eq!(
        plan.phases[0].ops,
        [
            Op::Map(id(0)),
            locked(id(0)),
            Op::Map(id(1)),
            locked(id(1)),
            Op::Unlock(id(0)),
            Op::Unmap(id(0)),
            Op::Map(id(2)),
            locked(id(2)),
        ]
    );
    assert_eq!(plan.locked_bytes_max(), Bytes(2 * 427_683_520));
    let scaled = builtin("mlock-cycle", &[]).unwrap();
    let files: u64 = scaled.regions.iter().map(|r| r.bytes).sum();
    assert!(files <= 2 << 30 && files > (2 << 30) - 20, "a quarter of memory: {files}");
}

#[test]
fn mmap3_verifies_what_it_wrote() {
    let plan = builtin("mmap3", &[]).unwrap();
    assert_eq!(plan.regions[0].bytes, 512 << 20);
    let ops: Vec<_> = plan.phases.iter().flat_map(|p| &p.ops).collect();
    let access = |op: &Op| if let Op::Touch(t) = op { t.access } else { panic!() };
    assert_eq!(access(ops[0]), Access::Write);
    assert_eq!(access(ops[1]), Access::Verify);
    assert_eq!(access(ops[2]), Access::Rewrite);
}

#[test]
fn the_machine_knows_its_published_parameters() {
    let mut machine = host();
    let own: Params = [("size".to_string(), "128M".to_string())].into();
    machine.job_params.insert("tlb-gather".into(), own);
    let job = Job::builtin("tlb-gather").unwrap();
    let bytes = |set: &Params| job.resolve(set, &machine, None).unwrap().regions[0].bytes;
    assert_eq!(bytes(&Params::new()), 128 << 20);
    assert_eq!(bytes(&[("size".to_string(), "1M".to_string())].into()), 1 << 20);
    let job_of = |set: &Params| job.resolve(set, &machine, None).unwrap().job;
    assert_eq!(job_of(&Params::new()).machine_params["size"], "128M", "and a report says so");
    let explicit = job_of(&[("size".to_string(), "1M".to_string())].into());
    assert!(explicit.machine_params.is_empty(), "the user's own choice");
    machine.job_params.get_mut("tlb-gather").unwrap().insert("size".into(), "512M".into());
    let job_of = |set: &Params| job.resolve(set, &machine, None).unwrap().job;
    assert!(job_of(&Params::new()).machine_params.is_empty(), "the default is no other value");
}

#[test]
fn same_seed_same_plan_other_seed_other_streams() {
    let job = Job::builtin("tlb-gather").unwrap();
    let plan = |seed| job.resolve(&Params::new(), &host(), Some(seed)).unwrap();
    assert_eq!(plan(3), plan(3));
    assert_ne!(plan(3).phases, plan(4).phases);
}

#[test]
fn mistakes_have_a_place_and_a_remedy() {
    let e = mistake("size = \"$size\"", "siez = \"$size\"");
    assert!(e.starts_with("j.toml:7:1: unknown field `siez`"), "{e}");
    assert!(e.contains("did you mean `size`?"), "{e}");
    let e = mistake("size = \"$size\"", "size = \"-3M\"");
    assert!(e.starts_with("j.toml:7:8:"), "{e}");
    let e = mistake("size = \"$size\"", "size = \"3s\"");
    assert!(e.contains("`3s` is a time") && e.contains("give a size"), "{e}");
    let e = mistake("touch = \"heap\"", "touch = \"heep\"");
    assert!(e.starts_with("j.toml:10:18:") && e.contains("did you mean `heap`?"), "{e}");
    let e = mistake("touch = \"heap\"", "touch = \"heap\", pattern = \"uniform\"");
    assert!(e.contains("add count"), "{e}");
    let e = mistake("touch = \"heap\"", "touch = \"heap\", pattern = \"zip\", count = 3");
    assert!(e.contains("did you mean `zipf`?"), "{e}");
    let e = mistake("touch = \"heap\"", "lock = \"heap\", stride = \"4K\"");
    assert!(e.contains("remove `stride`"), "{e}");
    let e = mistake("touch = \"heap\"", "sleep = \"-1s\"");
    assert!(e.contains("`-1s`"), "{e}");
    let e = mistake("{ touch = \"heap\" }", "");
    assert!(e.contains("phase `go` does nothing"), "{e}");
}

#[test]
fn unknown_parameters_are_refused() {
    let e = builtin("vmtest", &[("siz", "1M")]).unwrap_err().to_string();
    assert!(e.contains("--set siz") && e.contains("did you mean `size`?"), "{e}");
    let e = builtin("vmtest", &[("size", "lots")]).unwrap_err().to_string();
    assert!(e.contains("lots"), "{e}");
}

#[test]
fn a_list_is_a_sweep() {
    let text = SMALL.replace("size = \"1M\"", "size = [\"1M\", \"2M\"]");
    let e = resolve(&text).unwrap_err().to_string();
    assert!(e.contains("--set size=1M or 2M"), "{e}");
}

/// Checks that jobs in the documentation parse.
#[test]
fn documented_jobs_resolve() {
    let text = include_str!("../../../../docs/jobs.md");
    let jobs: Vec<_> =
        text.split("```toml").skip(1).map(|s| s.split("```").next().unwrap()).collect();
    assert!(!jobs.is_empty());
    for job in jobs {
        resolve(job).unwrap();
    }
}

/// Checks that every word of the language is documented.
#[test]
fn the_documentation_is_complete() {
    let text = include_str!("../../../../docs/jobs.md");
    let unknown = "name = \"x\"\nphase = [{ name = \"p\", ops = [], zzz = 1 }]";
    let phase_keys = Job::parse(unknown, "x").unwrap_err().message;
    let op_keys = Job::parse("name = \"x\"\nphase = [{ name = \"p\", ops = [{ zzz = 1 }] }]", "x");
    let region_keys =
        Job::parse("name = \"x\"\nregion = [{ name = \"r\", size = 1, zzz = 1 }]", "x");
    for message in [phase_keys, op_keys.unwrap_err().message, region_keys.unwrap_err().message] {
        let words: Vec<_> = message.split('`').skip(3).step_by(2).collect();
        assert!(words.len() > 5, "{message}");
        for word in words {
            assert!(text.contains(&format!("`{word}")), "docs/jobs.md says nothing of `{word}`");
        }
    }
}

/// Returns a job of one region and of phases, each given by its lines.
fn job_of(region: &str, phases: &[&str]) -> String {
    let mut text = format!("name = \"t\"\n[[region]]\nname = \"r\"\nsize = \"1M\"\n{region}\n");
    for phase in phases {
        text += &format!("[[phase]]\nname = \"p\"\n{phase}\n");
    }
    text
}

/// Returns the error of an invalid job, which must be at this line.
fn refused_at(line: usize, region: &str, phases: &[&str]) -> String {
    let error = resolve(&job_of(region, phases)).unwrap_err();
    assert!(error.place.starts_with(&format!("j.toml:{line}:")), "{error}");
    assert!(!error.remedy.is_empty());
    error.to_string()
}

fn accepted(region: &str, phases: &[&str]) {
    let text = job_of(region, phases);
    resolve(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
}

const READ: &str = "ops = [{ touch = \"r\" }]";
const WRITE: &str = "ops = [{ touch = \"r\", access = \"write\" }]";
const VERIFY: &str = "ops = [{ touch = \"r\", access = \"verify\" }]";
const CHASE: &str = "ops = [{ touch = \"r\", pattern = \"pointer-chase\", grain = \"64\" }]";
const MAP: &str = "ops = [{ map = \"r\" }]";
const UNMAP: &str = "ops = [{ unmap = \"r\" }]";

#[test]
fn regions_are_used_while_they_are_mapped() {
    assert!(refused_at(8, "mapped = false", &[READ]).contains("is not mapped by then"));
    assert!(refused_at(8, "", &[MAP]).contains("mapped already"));
    assert!(refused_at(11, "", &[UNMAP, READ]).contains("is not mapped"));
    for op in ["lock", "unlock", "unmap"] {
        let phase = format!("ops = [{{ {op} = \"r\" }}]");
        assert!(refused_at(8, "mapped = false", &[&phase]).contains("is not mapped"), "{op}");
    }
    let twice = format!("repeat = 2\n{MAP}");
    assert!(refused_at(9, "mapped = false", &[&twice]).contains("when its phase is repeated"));
    accepted("mapped = false", &[MAP, READ, UNMAP, MAP]);
    // Mappings of child processes end with them.
    accepted("mapped = false", &[&format!("clients = 2\n{MAP}"), MAP]);
    // A timed phase may end before it maps.
    let timed = format!("time = \"1ms\"\nrepeat = 1\n{MAP}");
    assert!(refused_at(13, "mapped = false", &[&timed, READ]).contains("by the clock"));
    let threads = format!("clients = 2\nclient_kind = \"threads\"\n{MAP}");
    assert!(refused_at(10, "mapped = false", &[&threads]).contains("threads share"));
}

#[test]
fn what_is_verified_was_written() {
    let sparse =
        "ops = [{ touch = \"r\", access = \"write\", pattern = \"strided\", stride = \"4K\" }]";
    let random = "ops = [{ touch = \"r\", access = \"write\", pattern = \"uniform\", count = 9 }]";
    for before in [&[][..], &[READ], &[sparse], &[random], &[WRITE, UNMAP, MAP]] {
        let phases: Vec<_> = before.iter().copied().chain([VERIFY]).collect();
        let error = refused_at(8 + 3 * before.len(), "", &phases);
        assert!(error.contains("sure to have written") && error.contains("by a whole sweep"));
    }
    accepted("", &[WRITE, VERIFY]);
    accepted("backing = \"memfd\"", &[WRITE, UNMAP, MAP, VERIFY]);
    accepted(
        "",
        &[WRITE, &VERIFY.replace("verify\"", "rewrite\", pattern = \"uniform\", count = 5")],
    );
    accepted("", &[sparse, &sparse.replace("write", "verify").replace("4K", "16K")]);
    // A file that is read first already holds the pattern.
    accepted("backing = \"file\"", &[VERIFY]);
    refused_at(11, "backing = \"file\"", &[sparse, VERIFY]);
    // Children write to their own pages, threads to shared ones.
    let (children, threads) = ("clients = 2\n", "clients = 2\nclient_kind = \"threads\"\n");
    refused_at(12, "", &[&format!("{children}{WRITE}"), VERIFY]);
    accepted("", &[&format!("{threads}{WRITE}"), VERIFY]);
    accepted("backing = \"shared\"", &[&format!("{children}{WRITE}"), VERIFY]);
    // A timed phase may end before the sweep.
    refused_at(12, "", &[&format!("time = \"1s\"\n{WRITE}"), VERIFY]);
    // DONTNEED drops the pattern of private memory.
    let drop = "ops = [{ advise = \"r\", advice = \"dontneed\" }]";
    refused_at(14, "", &[WRITE, drop, VERIFY]);
    accepted("backing = \"shared\"", &[WRITE, drop, VERIFY]);
    accepted("backing = \"file\"", &[VERIFY, drop, VERIFY]);
    let beside = format!(
        "{threads}ops = [{{ touch = \"r\", access = \"write\" }}, {{ barrier = true }}, \
         {{ touch = \"r\", access = \"verify\" }}, {{ advise = \"r\", advice = \"dontneed\" }}]"
    );
    refused_at(10, "", &[&beside]);
}

#[test]
fn chases_have_their_links_alone() {
    let both = "is both chased and verified";
    assert!(refused_at(14, "", &[WRITE, CHASE, VERIFY]).contains(both));
    accepted("", &[WRITE, CHASE]);
    let chase = CHASE.trim_end_matches(']');
    let written = format!("{chase}, {{ touch = \"r\", access = \"write\" }}]");
    assert!(refused_at(8, "", &[&written]).contains("overwritten"));
    let others = format!("{chase}, {}]", chase.trim_start_matches("ops = [").replace("64", "128"));
    accepted("", &[&others]);
    refused_at(10, "", &[&format!("clients = 2\nclient_kind = \"threads\"\n{others}")]);
    let writes = CHASE.replace("grain", "access = \"write\", grain");
    assert!(refused_at(8, "", &[&writes]).contains("does not read"));
}

#[test]
fn advice_fits_its_memory() {
    let advise = |advice: &str| format!("ops = [{{ advise = \"r\", advice = \"{advice}\" }}]");
    assert!(refused_at(8, "backing = \"shared\"", &[&advise("free")]).contains("not private"));
    accepted("", &[&advise("free")]);
    let lock = "ops = [{ lock = \"r\" }]";
    for advice in ["dontneed", "free", "cold", "pageout"] {
        assert!(refused_at(11, "", &[lock, &advise(advice)]).contains("may be locked"), "{advice}");
        accepted("", &[lock, "ops = [{ unlock = \"r\" }]", &advise(advice)]);
        accepted("", &[&format!("clients = 2\n{lock}"), &advise(advice)]);
    }
    refused_at(8, "page_size = \"hugetlb:2M\"", &[&advise("pageout")]);
    assert!(
        refused_at(3, "backing = \"file\"\npage_size = \"hugetlb:2M\"", &[READ])
            .contains("cannot have hugetlb")
    );
}

#[test]
fn network_memory_is_only_touched() {
    let remote = "backing = \"remote\"";
    assert!(refused_at(7, remote, &[&format!("clients = 2\n{READ}")]).contains("threads"));
    accepted(remote, &[&format!("clients = 2\nclient_kind = \"threads\"\n{READ}")]);
    assert!(refused_at(8, remote, &["ops = [{ lock = \"r\" }]"]).contains("locking"));
    let later = format!("{remote}\nmapped = false");
    assert!(refused_at(3, &later, &[MAP]).contains("another backing"));
    let small = format!("{remote}\nresident = \"4K\"");
    assert!(refused_at(3, &small, &[READ]).contains("128K"));
    assert!(
        refused_at(3, &format!("{remote}\npage_size = \"hugetlb:2M\""), &[READ])
            .contains("page_size")
    );
}

#[test]
fn numbers_are_within_what_every_machine_can_count() {
    for line in ["rate = \"0\"", "rate = \"5_000_000_000\"", "switch_rate = \"4_000_000_000\""] {
        let phase = format!("clients = 2\n{line}\n{READ}");
        assert!(refused_at(9, "", &[&phase]).contains("keep it from 0.001 to"), "{line}");
    }
    let zipf = READ.replace(" }", ", pattern = \"zipf\", theta = 90, count = 5 }");
    assert!(refused_at(8, "", &[&zipf]).contains("from 0.01 to 10"));
    let still = job_of("", &[READ]) + "[measure]\ninterval = \"0s\"\n";
    assert!(resolve(&still).unwrap_err().to_string().contains("interval"));
    let flip =
        |offset: &str| job_of("", &[WRITE]) + &format!("[native]\nflip_byte_at = {offset}\n");
    assert!(resolve(&flip("1048575")).is_ok());
    assert!(resolve(&flip("1048576")).unwrap_err().place.contains("j.toml:10:"));
}
