//! `pagetax why`: plants of each cause, as real processes, and controls in which no cause may be named.
//!
//! Plants that change settings of the system are in `system`: `cargo xtask kernels` runs them in a guest.

mod planted;
mod system;

use planted::{Plant, compiled, is_root, refused, thp_mode};
use serde_json::Value;

/// The memory of most plants.
const BYTES: u64 = 16 << 20;
/// That of `malloc`, whose mapping is not aligned.
const MALLOC_BYTES: u64 = 4 * BYTES;

/// Asserts that a cause is the first one, explains most of `bytes`, and comes with evidence and a hint.
fn assert_cause(answer: &Value, id: &str, certainty: &str, bytes: u64) {
    let first = &answer["causes"][0];
    assert_eq!((&first["id"], &first["certainty"]), (&id.into(), &certainty.into()), "{answer:#}");
    let explained = first["bytes"].as_u64().unwrap();
    assert!(explained >= bytes * 8 / 10 && explained <= bytes * 11 / 10, "{answer:#}");
    let evidence = first["evidence"].as_array().unwrap();
    let is_whole =
        |one: &Value| ["source", "value"].iter().all(|key| !one[key].as_str().unwrap().is_empty());
    assert!(!evidence.is_empty() && evidence.iter().all(is_whole), "{answer:#}");
    assert!(!first["hint"].as_str().unwrap().is_empty(), "{answer:#}");
    let what = first["what"].as_str().unwrap();
    assert!(answer["summary"].as_str().unwrap().contains(what), "{answer:#}");
}

/// Returns true if memory gets huge pages on advice only, as the plants of advice assume.
fn is_on_advice() -> bool {
    let is = thp_mode() == "madvise";
    if !is {
        println!("SKIP: transparent huge pages are not on advice (madvise)");
    }
    is
}

mod memory {
    use super::*;

    #[test]
    fn mappings_that_are_smaller_than_a_huge_page() {
        let answer = Plant::of("small-mappings").answer();
        assert_cause(&answer, "no_mapping_of_2m", "certain", 2 * BYTES);
    }

    #[test]
    fn mappings_without_an_aligned_block() {
        assert_cause(&Plant::of("unaligned").answer(), "unaligned", "certain", 8 * (3 << 20));
    }

    #[test]
    fn memory_that_refuses_huge_pages() {
        assert_cause(&Plant::of("refused").answer(), "no_huge_page_advice", "certain", BYTES);
    }

    #[test]
    fn memory_that_nobody_advised() {
        if is_on_advice() {
            assert_cause(&Plant::of("plain").answer(), "advice_only", "certain", BYTES);
        }
    }

    /// Asserts the cause of what is on small pages: khugepaged may take 16 MiB at once.
    fn assert_cause_of_rest(plant: &str, id: &str) {
        if thp_mode() == "never" {
            println!("SKIP: transparent huge pages are switched off");
            return;
        }
        let answer = Plant::of(plant).answer();
        let [all, huge] = ["anon_bytes", "huge_bytes"].map(|key| answer[key].as_u64().unwrap());
        assert!(all - huge >= 2 * BYTES, "{answer:#}");
        assert_cause(&answer, id, "possible", all - huge);
    }

    #[test]
    fn memory_that_khugepaged_has_still_to_join() {
        assert_cause_of_rest("late", "khugepaged");
    }

    #[test]
    fn memory_that_a_forked_child_wrote() {
        assert_cause_of_rest("forked-child", "copy_on_write");
    }

    #[test]
    fn memory_that_a_parent_wrote_after_its_fork() {
        assert_cause_of_rest("forked-parent", "copy_on_write");
    }
}

mod files {
    use super::*;

    /// Asserts that a plant names its whole blocks, in a mapping of 18 MiB: eight, or nine if the kernel
    /// chose an aligned address.
    fn assert_whole_blocks(plant: &str) {
        let answer = Plant::of(plant).answer();
        let bytes = answer["causes"][0]["bytes"].as_u64().unwrap();
        assert!(bytes == 16 << 20 || bytes == 18 << 20, "{answer:#}");
        assert_cause(&answer, "shared_memory", "certain", bytes);
    }

    #[test]
    fn a_file_whose_address_and_offset_differ() {
        let answer = Plant::of("file-unaligned").answer();
        assert_cause(&answer, "file_unaligned", "certain", BYTES);
    }

    #[test]
    fn a_memfd_without_huge_pages() {
        assert_whole_blocks("memfd");
    }

    #[test]
    fn shared_anonymous_memory_without_huge_pages() {
        assert_whole_blocks("shared");
    }

    #[test]
    fn a_tmpfs_without_huge_pages() {
        assert_whole_blocks("tmpfs");
    }

    #[test]
    fn data_of_a_program() {
        let answer = Plant::of("data").answer();
        // Two or three whole blocks, by the address that the kernel chose.
        let bytes = answer["causes"][0]["bytes"].as_u64().unwrap();
        assert!(bytes == 4 << 20 || bytes == 6 << 20, "{answer:#}");
        assert_cause(&answer, "private_file", "certain", bytes);
    }
}

mod process {
    use super::*;
    use std::path::Path;

    const PRELOAD: &str = "LD_PRELOAD";

    /// Returns a path of the preload library as an installed pagetax has it.
    fn library(folder: &Path) -> String {
        let library = folder.join("libpagetax_preload.so");
        // Its content is never loaded: only what the loader does with the name matters.
        std::fs::copy("/proc/self/exe", &library).unwrap();
        library.to_str().unwrap().into()
    }

    #[test]
    fn a_process_that_forbids_itself_huge_pages() {
        assert_cause(&Plant::of("prctl").answer(), "prctl", "certain", BYTES);
    }

    #[test]
    fn malloc_whose_pool_is_empty() {
        if planted::pool_pages() != 0 {
            println!("SKIP: the pool of 2M pages is not empty");
            return;
        }
        let plant =
            Plant::with("malloc", "plants", &[("GLIBC_TUNABLES", "glibc.malloc.hugetlb=2")]);
        assert_cause(&plant.answer(), "hugetlb_pool", "certain", MALLOC_BYTES);
    }

    #[test]
    fn a_program_of_another_libc_that_ignores_the_tunable() {
        if is_on_advice() {
            let set = [("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")];
            let answer = Plant::with("malloc", "plants-musl", &set).answer();
            assert_cause(&answer, "allocator_setting_ignored", "certain", MALLOC_BYTES);
        }
    }

    #[test]
    fn a_setting_of_an_allocator_that_the_program_does_not_use() {
        if is_on_advice() {
            let answer = Plant::with("malloc", "plants", &[("MALLOC_CONF", "thp:always")]).answer();
            assert_cause(&answer, "allocator_setting_ignored", "certain", MALLOC_BYTES);
        }
    }

    #[test]
    fn a_preload_library_in_a_static_program() {
        if is_on_advice() {
            let folder = tempfile::tempdir().unwrap();
            let set = [(PRELOAD, &*library(folder.path()))];
            let answer = Plant::with("malloc", "plants-static", &set).answer();
            assert_cause(&answer, "preload_failed", "certain", MALLOC_BYTES);
            assert!(
                answer["causes"][0]["what"].as_str().unwrap().contains("the program is static")
            );
        }
    }

    #[test]
    fn a_preload_library_that_does_not_exist() {
        if is_on_advice() {
            let set = [(PRELOAD, "/nonexistent/libpagetax_preload.so")];
            let answer = Plant::with("malloc", "plants", &set).answer();
            assert_cause(&answer, "preload_failed", "certain", MALLOC_BYTES);
            assert!(answer["causes"][0]["what"].as_str().unwrap().contains("no such file"));
        }
    }
}

mod controls {
    use super::*;

    /// Asserts that the answer says that the process has its huge pages, and names no cause.
    fn assert_no_cause(answer: &Value, bytes: u64) {
        assert_eq!(answer["causes"].as_array().unwrap().len(), 0, "{answer:#}");
        assert!(answer["huge_bytes"].as_u64().unwrap() >= bytes * 9 / 10, "{answer:#}");
        let summary = answer["summary"].as_str().unwrap();
        assert!(summary.starts_with("It has its huge pages"), "{answer:#}");
    }

    fn control(name: &str) -> Option<Value> {
        (thp_mode() != "never").then(|| {
            let answer = Plant::of(name).answer();
            assert_no_cause(&answer, BYTES);
            answer
        })
    }

    #[test]
    fn advised_memory() {
        let Some(answer) = control("huge") else { return };
        assert_eq!(answer["untouched"]["value"], 0, "{answer:#}");
    }

    #[test]
    fn memory_with_a_protected_part() {
        control("huge-protected");
    }

    #[test]
    fn memory_of_a_parent_whose_child_only_read() {
        control("huge-forked");
    }

    #[test]
    fn malloc_that_obeys_its_tunable() {
        if thp_mode() != "never" {
            let set = [("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")];
            let answer = Plant::with("malloc", "plants-static", &set).answer();
            assert_no_cause(&answer, MALLOC_BYTES * 9 / 10);
        }
    }

    #[test]
    fn memory_that_was_hardly_touched_is_counted() {
        let Some(answer) = control("huge-sparse") else { return };
        let untouched = answer["untouched"]["value"].as_u64().unwrap();
        let half = BYTES / 2;
        assert!(untouched > half * 9 / 10 && untouched < half, "{answer:#}");
    }
}

mod rights {
    use super::*;
    use std::process::Command;

    #[test]
    fn processes_are_named_by_option_or_operand() {
        let plant = Plant::of("prctl");
        let pid = plant.pid();
        let document = planted::document(&["-p", &format!("{pid},{pid}"), pid]);
        assert_eq!(document["processes"].as_array().unwrap().len(), 3, "{document:#}");
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        for (operand, word) in [("x", "no process id"), ("4194305", "no process 4194305")] {
            let (code, stderr) = refused(&[operand]);
            assert!(code == Some(2) && stderr.contains(word), "{code:?} {stderr}");
        }
    }

    #[test]
    fn an_ordinary_user_is_refused_what_is_not_theirs() {
        if !is_root() {
            return;
        }
        let plant = Plant::of("prctl");
        let folder = planted::readable_folder();
        let own = folder.path().join("pagetax");
        std::fs::copy(env!("CARGO_BIN_EXE_pagetax"), &own).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        let output = command.arg(&own).args(["why", plant.pid()]).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{stderr}");
        assert!(stderr.contains("may not be looked at") && stderr.contains("root"), "{stderr}");
    }

    #[test]
    fn a_preload_library_in_a_set_id_program() {
        if !is_root() || !is_on_advice() {
            return;
        }
        let folder = planted::readable_folder();
        let program = folder.path().join("plants");
        std::fs::copy(compiled("plants"), &program).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o4755);
        std::fs::set_permissions(&program, mode).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command.arg(&program).arg("malloc");
        command.env("LD_PRELOAD", "/usr/lib/libpagetax_preload.so");
        let answer = Plant::start(command).answer();
        assert_cause(&answer, "preload_failed", "certain", MALLOC_BYTES);
        assert!(answer["causes"][0]["what"].as_str().unwrap().contains("set-id"), "{answer:#}");
    }
}
