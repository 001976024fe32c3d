//! The job of a recorded program: one region for all of its memory, and one phase with a client for each
//! of its threads.

use super::Job;
use crate::replay::RecordedProgram;

impl Job {
    /// Makes a recording a job. `name` is the file's name, `what` a summary of one line.
    pub fn of_recording(name: &str, what: &str, recording: RecordedProgram) -> Job {
        let threads = recording.0.threads().len();
        let clients = match threads {
            0 | 1 => String::new(),
            threads => format!("clients = {threads}\nclient_kind = \"threads\"\n"),
        };
        let text = format!(
            "name = {}\nsummary = {}\n\n[params]\npage_size = {{ default = \"default\", \
             meaning = \"of all memory: default, base, 64K, 2M, hugetlb:2M, …\" }}\n\n[[region]]\n\
             name = \"program\"\nsize = \"{bytes}B\"\npage_size = \"$page_size\"\n\n[[phase]]\n\
             name = \"replay\"\n{clients}ops = [{{ replay = \"program\" }}]\n",
            toml::Value::from(name),
            toml::Value::from(what),
            bytes = recording.0.bytes().max(1),
        );
        let job = Job::parse(&text, name).expect("the text is ours");
        Job { recording: Some(recording), ..job }
    }
}

#[cfg(test)]
mod tests {
    use crate::job::Job;
    use crate::machine::{MachineKind, MachineSpec};
    use crate::page_size::PageSizeRequest;
    use crate::plan::{ClientKind, Op};
    use crate::quantity::Params;
    use crate::replay::tests::Listed;
    use crate::units::{Bytes, PageSize};

    fn spec() -> MachineSpec {
        MachineSpec {
            name: "sim".into(),
            kind: MachineKind::Sim,
            validated_jobs: Vec::new(),
            memory: Bytes(1 << 30),
            base_page: PageSize::K4,
            page_sizes: vec![PageSize::K4],
            cpus: 1,
            job_params: Default::default(),
        }
    }

    #[test]
    fn a_recording_is_a_plan() {
        let recording = Listed::recording(vec![vec![0, 4096], vec![8192]]);
        let job = Job::of_recording("a \"b\"'\u{301}\u{7f}.ptt", "sort \\ x\n'''\r", recording);
        let settings = Params::from([("page_size".into(), "2M".into())]);
        let plan = job.resolve(&settings, &spec(), None).unwrap();
        assert_eq!(plan.regions[0].page_size, PageSizeRequest::preferred(PageSize::M2));
        assert_eq!(plan.regions[0].bytes, 1 << 22);
        let phase = &plan.phases[0];
        assert_eq!((phase.client_kind, phase.clients), (ClientKind::Threads, 2));
        let [Op::Replay(replay)] = &phase.ops[..] else { panic!("{:?}", phase.ops) };
        assert_eq!(replay.changes(1).map(|change| change.offset).collect::<Vec<_>>(), [8192]);
        assert_eq!(phase.access_count(), 12.0);
        assert_eq!(plan, plan.clone());
    }

    #[test]
    fn a_file_has_nothing_to_replay() {
        let text = "name = \"x\"\n[[region]]\nname = \"a\"\nsize = \"1M\"\n[[phase]]\nname = \"p\"\n\
                    ops = [{ replay = \"a\" }]\n";
        let job = Job::parse(text, "x.toml").unwrap();
        let error = job.resolve(&Params::new(), &spec(), None).unwrap_err();
        assert!(error.to_string().contains("no recording"), "{error}");
    }
}
