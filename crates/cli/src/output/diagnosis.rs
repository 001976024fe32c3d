//! A diagnosis as text. By default it fits a screen: the trials, the tax, the verdict, and the lines that
//! apply it. `--full` has every table. The last line of both is the one to paste into a shell.

use super::{budget, report, text};
use pagetax_core::budget::TimeRow;
use pagetax_core::cause::Account;
use pagetax_core::diagnosis::{
    AS_IS, BASE, CHECK, Diagnosis, Skipped, StateTrials, TAX_DISAGREES, Took, Trial,
};
use pagetax_core::report::Warning;
use pagetax_core::stats::{Ratio, median};
use pagetax_core::system_stat::huge_blocks;
use pagetax_core::units::{Bytes, Nanos};

/// The columns of a line that is not to be pasted.
const COLUMNS: usize = 100;
/// The lines of the report that fits a screen.
const LINES: usize = 25;
/// From this share of memory on large pages on, nothing needs to be explained.
const ENOUGH: f64 = 0.9;
/// A cause with a smaller share of the CPU time is not listed.
const SHARE_MIN: f64 = 0.005;
/// The most trials that a line for a state of memory has.
const STATE_TRIALS_MAX: usize = 4;
/// The most causes of the tax that are listed.
const CAUSES_MAX: usize = 3;

/// Renders the report that fits a screen.
pub fn render(diagnosis: &Diagnosis) -> String {
    let rounds = diagnosis.trials.iter().map(|trial| trial.runs_ns.len()).max().unwrap_or(0);
    let has_probe = diagnosis.trials.iter().any(|trial| !trial.probe_ns.is_empty());
    let mut loads = diagnosis.trials.iter().flat_map(|trial| &trial.loads);
    let how = match (diagnosis.side_by_side, has_probe) {
        (true, _) => " side by side",
        (false, true) => " beside a speed probe",
        (false, false) if loads.any(|load| load.request_count.is_some()) => {
            ", latencies of --probe"
        }
        (false, false) => "",
    };
    let title = format!(
        "{}: {}, {rounds} rounds of {} trials{how}",
        fit(&diagnosis.command.join(" "), COLUMNS - 50 - how.len()),
        diagnosis.exit,
        diagnosis.trials.len()
    );
    let bold = anstyle::Style::new().bold();
    let tail =
        tax(diagnosis) + &states(diagnosis) + &warnings(diagnosis) + &short_verdict(diagnosis);
    // The title is a line, and one says why a trial has memory on small pages.
    let room = LINES.saturating_sub(tail.lines().count() + 2);
    let head = format!("{bold}{title}{bold:#}\n{}", short_trials(diagnosis, room));
    let room = LINES.saturating_sub(head.lines().count() + tail.lines().count());
    head + &shares(diagnosis, room.max(1)) + &tail
}

/// Renders the whole diagnosis.
pub fn full(diagnosis: &Diagnosis) -> String {
    let mut out = title(diagnosis);
    out += &trials(&diagnosis.trials);
    out += &skipped(&diagnosis.skipped);
    if let Some(budget) = &diagnosis.budget {
        out += &budget::render(budget);
    }
    out += &diagnosis.states.iter().map(full_state).collect::<String>();
    out += &report::warnings(&diagnosis.warnings);
    out + &verdict(diagnosis)
}

/// Renders a line for each state of memory: the free blocks, and the speed-ups of the winner and the first
/// trials.
fn states(diagnosis: &Diagnosis) -> String {
    if diagnosis.states.is_empty() {
        return String::new();
    }
    let winner = diagnosis.verdict.winner.as_deref();
    let others = |trial: &&Trial| ![AS_IS, CHECK].contains(&trial.name.as_str());
    let mut names: Vec<&str> =
        diagnosis.trials.iter().filter(others).map(|trial| trial.name.as_str()).collect();
    names.sort_by_key(|name| Some(*name) != winner);
    names.truncate(STATE_TRIALS_MAX);
    let cells = |trials: &[Trial]| -> Vec<String> {
        let of = |name: &&str| trials.iter().find(|trial| trial.name == **name);
        names.iter().map(|name| ratio(of(name).and_then(|trial| trial.speedup))).collect()
    };
    let mut rows = vec![[vec!["fresh".into(), String::new()], cells(&diagnosis.trials)].concat()];
    let mut lines = String::new();
    for state in &diagnosis.states {
        if !state.trials.is_empty() {
            let free = free_blocks(state);
            rows.push([vec![state.state.to_string(), free], cells(&state.trials)].concat());
        }
        if let Some(why) = &state.why_not {
            let line = format!("  {}: {why}", state.state);
            lines += &format!("{}\n", fit(&line, COLUMNS));
        }
    }
    let headings: Vec<&str> =
        ["memory", "free 2M"].into_iter().chain(names.iter().copied()).collect();
    let right: Vec<usize> = (1..headings.len()).collect();
    format!("\n{}{lines}", text::table(&headings, &right, rows))
}

/// Renders the number of free blocks of 2M and more.
fn free_blocks(state: &StateTrials) -> String {
    match state.free_blocks.is_empty() {
        true => text::MISSING.into(),
        false => text::count(huge_blocks(&state.free_blocks)),
    }
}

/// Renders all of one state of memory.
fn full_state(state: &StateTrials) -> String {
    let mut out = text::heading(&format!("Memory: {}", state.state));
    if let Some(why) = &state.why_not {
        out += &format!("  {why}\n");
    }
    if state.trials.is_empty() {
        return out;
    }
    let blocks: Vec<String> = state.free_blocks.iter().map(|count| text::count(*count)).collect();
    out +=
        &format!("  {}\n  free blocks of 1, 2, 4 … base pages: {}\n", state.how, blocks.join(" "));
    out += &trials(&state.trials);
    for growth in &state.growth {
        out += &format!(
            "  {}: {} {} → {}\n",
            state.loser.as_deref().unwrap_or_default(),
            growth.id,
            Nanos(growth.before_ns),
            Nanos(growth.after_ns)
        );
    }
    out
}

/// Cuts a line to so many columns, with a mark.
fn fit(line: &str, columns: usize) -> String {
    let line = line.replace('\n', " ");
    match line.chars().count() > columns {
        true => line.chars().take(columns - 1).chain(['…']).collect(),
        false => line,
    }
}

/// Renders the trials in so many lines. Where there are more trials, the fastest ones are shown.
fn short_trials(diagnosis: &Diagnosis, room: usize) -> String {
    let winner = diagnosis.verdict.winner.as_deref();
    let row = |trial: &&Trial| {
        let share = trial.took.fraction.map_or(text::MISSING.into(), percent);
        let is_winner = Some(trial.name.as_str()) == winner;
        vec![
            trial.name.clone(),
            diagnosis.basis.median_text(trial),
            if trial.name == AS_IS { "1".into() } else { ratio(trial.speedup) },
            trial.peak_resident_bytes.map_or(text::MISSING.into(), |b| Bytes(b).to_string()),
            untouched(trial),
            share,
            median(&trial.fault_counts).map_or(text::MISSING.into(), text::count),
            if is_winner { "◀".into() } else { String::new() },
        ]
    };
    let headings = [
        "trial",
        diagnosis.basis.heading(),
        "speed-up (95 %)",
        "memory",
        "untouched",
        "large pages",
        "page faults",
        "",
    ];
    // An empty line and the headings stand above the rows.
    let room = room.saturating_sub(2);
    let not_tried = not_tried(&diagnosis.skipped, room.saturating_sub(diagnosis.trials.len()));
    let shown = shown_trials(diagnosis, room.saturating_sub(not_tried.len()));
    let rows = shown.iter().map(row).collect();
    let mut out = format!("\n{}", text::table(&headings, &[1, 3, 4, 5, 6], rows));
    let hidden = diagnosis.trials.len() - shown.len();
    if hidden > 0 {
        out += &format!("  {hidden} slower trials: --full\n");
    }
    out + &not_tried.concat()
}

/// Returns the memory that a trial holds and the command never touched.
fn untouched(trial: &Trial) -> String {
    trial.untouched_bytes.map_or(text::MISSING.into(), |bytes| Bytes(bytes).to_string())
}

/// Returns a line for each trial that was not made, or one for all if there is no room.
fn not_tried(skipped: &[Skipped], room: usize) -> Vec<String> {
    let line = |text: String| format!("{}\n", fit(&text, COLUMNS));
    if skipped.len() <= room.max(1) {
        let each = |one: &Skipped| line(format!("  {}  not tried: {}", one.name, one.why));
        return skipped.iter().map(each).collect();
    }
    let names: Vec<&str> = skipped.iter().map(|one| one.name.as_str()).collect();
    vec![line(format!("  not tried (--full has the reasons): {}", names.join(", ")))]
}

/// Returns so many trials in their order: those that others are compared with, the winner, and the fastest
/// ones. If any is left out, its line is counted.
fn shown_trials(diagnosis: &Diagnosis, room: usize) -> Vec<&Trial> {
    let trials = &diagnosis.trials;
    if trials.len() <= room {
        return trials.iter().collect();
    }
    let is_kept = |trial: &Trial| {
        [AS_IS, BASE, CHECK].contains(&trial.name.as_str())
            || Some(&trial.name) == diagnosis.verdict.winner.as_ref()
    };
    let mut best: Vec<&Trial> = trials.iter().collect();
    best.sort_by_key(|trial| (!is_kept(trial), diagnosis.basis.median_ns(trial)));
    best.truncate(room.saturating_sub(1).max(1));
    trials.iter().filter(|trial| best.iter().any(|shown| shown.name == trial.name)).collect()
}

/// Renders in so many lines why trials have memory on small pages: first the trial that counts, and trials of
/// one reason together.
fn shares(diagnosis: &Diagnosis, room: usize) -> String {
    let is_low = |trial: &&Trial| trial.took.fraction.is_none_or(|share| share < ENOUGH);
    let others = |trial: &&Trial| ![AS_IS, CHECK].contains(&trial.name.as_str());
    let low = diagnosis.trials.iter().filter(others).filter(is_low);
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for (trial, why) in low.filter_map(|trial| Some((trial, trial.took.why.as_deref()?))) {
        match reasons.iter_mut().find(|(known, _)| *known == why) {
            Some((_, names)) => names.push(&trial.name),
            None => reasons.push((why, vec![&trial.name])),
        }
    }
    let winner = diagnosis.verdict.winner.as_deref().unwrap_or_default();
    reasons.sort_by_key(|(_, names)| !names.contains(&winner));
    let line = |(why, names): &(&str, Vec<&str>)| {
        format!("{}\n", fit(&format!("  {}: {why}", names.join(", ")), COLUMNS))
    };
    reasons.iter().take(room).map(line).collect()
}

/// Renders the tax in one line, its largest causes, and the warning if the trials saved more.
fn tax(diagnosis: &Diagnosis) -> String {
    let Some(budget) = &diagnosis.budget else { return String::new() };
    let Some(line) = budget::tax(budget) else { return String::new() };
    let mut out = format!("\n{}", wrapped(&line));
    let total_ns = budget.total_ns(Account::Cpu);
    let is_tax =
        |row: &&TimeRow| Account::Cpu.causes().any(|cause| cause.is_tax && cause.id == row.id);
    let least_ns = (total_ns as f64 * SHARE_MIN) as u64;
    let rows = budget.rows(Account::Cpu).iter().filter(is_tax);
    let mut rows: Vec<_> = rows.filter(|row| row.ns > Some(least_ns)).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.ns));
    let cells = |row: &&TimeRow| {
        let ns = row.ns.unwrap_or(0);
        let range = match (row.low_ns, row.high_ns) {
            (Some(low), Some(high)) if low != high => format!("{}–{}", Nanos(low), Nanos(high)),
            _ => String::new(),
        };
        let share = percent(ns as f64 / total_ns.max(1) as f64);
        vec![row.id.clone(), Nanos(ns).to_string(), share, range, fit(&row.how, 48)]
    };
    let cells = rows.iter().take(CAUSES_MAX).map(cells).collect();
    out += &text::table(&["", "", "", "", ""], &[1, 2], cells);
    let disagrees = diagnosis.warnings.iter().find(|warning| is_of_tax(warning));
    out + &disagrees
        .map_or(String::new(), |warning| format!("  {}\n", fit(&warning.text, COLUMNS - 2)))
}

/// Returns true for the warning that stands beside the tax, not among the others.
fn is_of_tax(warning: &Warning) -> bool {
    warning.id == TAX_DISAGREES
}

fn warnings(diagnosis: &Diagnosis) -> String {
    let mut others = diagnosis.warnings.iter().filter(|warning| !is_of_tax(warning));
    let Some(first) = others.next() else { return String::new() };
    let style = anstyle::AnsiColor::Yellow.on_default().bold();
    let more = match others.count() {
        0 => String::new(),
        more => format!(" ({more} more: --full)"),
    };
    let room = COLUMNS - "warning: ".len() - more.len();
    format!("{style}warning:{style:#} {}{more}\n", fit(&first.text, room))
}

fn short_verdict(diagnosis: &Diagnosis) -> String {
    let verdict = &diagnosis.verdict;
    let bold = anstyle::Style::new().bold();
    let mut out = wrapped(&format!("Verdict: {}", verdict.reason));
    out = format!("\n{bold}{}{bold:#}", out);
    out += &saved(diagnosis).map_or(String::new(), |line| format!("  {line}\n"));
    let Some(line) = &verdict.apply else { return out };
    let mut place = |name: &str, lines: &[String]| {
        for (index, line) in lines.iter().enumerate() {
            out += &format!("  {:<12}{line}\n", if index == 0 { name } else { "" });
        }
    };
    place("systemd", &verdict.systemd);
    place("Dockerfile", &verdict.dockerfile);
    out + &format!("Apply it:\n{line}\n")
}

/// Breaks a sentence into lines of [`COLUMNS`].
fn wrapped(sentence: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in sentence.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= COLUMNS => {
                *line += &format!(" {word}");
            }
            None => lines.push(word.into()),
            Some(_) => lines.push(format!("  {word}")),
        }
    }
    lines.join("\n") + "\n"
}

/// Renders the time that the winner saves, and of what.
fn saved(diagnosis: &Diagnosis) -> Option<String> {
    let named = |name: &str| diagnosis.trials.iter().find(|trial| trial.name == name);
    let as_is = named(AS_IS)?;
    let winner = named(diagnosis.verdict.winner.as_deref()?)?;
    if diagnosis.basis.is_load() {
        return None;
    }
    let now_ns = diagnosis.basis.median_ns(as_is);
    let ns = now_ns.checked_sub(diagnosis.basis.median_ns(winner))?;
    let middle = |runs: &[u64]| median(runs).unwrap_or(0);
    let less = |of: fn(&Trial) -> &[u64]| middle(of(as_is)).saturating_sub(middle(of(winner)));
    let (user_ns, kernel_ns) = (less(|trial| &trial.user_ns), less(|trial| &trial.kernel_ns));
    let faults = match (median(&as_is.fault_counts), median(&winner.fault_counts)) {
        (Some(before), Some(after)) if after < before => {
            format!("fewer page faults ({} → {})", text::count(before), text::count(after))
        }
        _ => "less work in the kernel".into(),
    };
    let walks = "fewer page walks".to_string();
    let of = match (user_ns, kernel_ns) {
        (0, 0) => return Some(format!("{} saved", Nanos(ns))),
        (_, 0) => walks,
        (0, _) => faults,
        (user, kernel) if user > kernel => format!("{walks}, then {faults}"),
        _ => format!("{faults}, then {walks}"),
    };
    Some(format!("{} of {} saved: {of}", Nanos(ns), Nanos(now_ns)))
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn title(diagnosis: &Diagnosis) -> String {
    let bold = anstyle::Style::new().bold();
    format!("{bold}{}{bold:#}: {}\n", diagnosis.command.join(" "), diagnosis.exit)
}

fn ratio(ratio: Option<Ratio>) -> String {
    ratio.map_or(text::MISSING.into(), |ratio| ratio.to_string())
}

fn took(took: &Took) -> String {
    match (took.bytes, took.fraction) {
        (None, _) => text::MISSING.into(),
        (Some(bytes), None) => Bytes(bytes).to_string(),
        (Some(bytes), Some(share)) => format!("{} ({:.0} %)", Bytes(bytes), share * 100.0),
    }
}

fn trials(trials: &[Trial]) -> String {
    let row = |trial: &Trial| {
        let (low, high) = (trial.runs_ns.iter().min(), trial.runs_ns.iter().max());
        let peak = trial.peak_resident_bytes;
        vec![
            trial.name.clone(),
            trial.runs_ns.len().to_string(),
            Nanos(trial.median_ns).to_string(),
            low.map(|ns| Nanos(*ns).to_string()).unwrap_or_default(),
            high.map(|ns| Nanos(*ns).to_string()).unwrap_or_default(),
            if trial.name == AS_IS { "1".into() } else { ratio(trial.speedup) },
            if trial.name == BASE { "1".into() } else { ratio(trial.speedup_over_base) },
            peak.map_or(text::MISSING.into(), |bytes| Bytes(bytes).to_string()),
            untouched(trial),
            took(&trial.took),
        ]
    };
    let headings = [
        "trial",
        "runs",
        "median",
        "fastest",
        "slowest",
        "speed-up (95 %)",
        "over base (95 %)",
        "peak memory",
        "untouched",
        "on large pages",
    ];
    let rows = trials.iter().map(row).collect();
    let mut out = text::heading("Trials") + &text::table(&headings, &[1, 2, 3, 4, 7, 8, 9], rows);
    for trial in trials {
        if let Some(why) = &trial.took.why {
            out += &format!("  {}: {why}\n", trial.name);
        }
    }
    if trials.iter().any(|trial| trial.peak_resident_bytes.is_none()) {
        out += "  no peak memory: the runs were too short, or the machine too busy, to look often enough\n";
    }
    out
}

fn skipped(skipped: &[Skipped]) -> String {
    if skipped.is_empty() {
        return String::new();
    }
    let line = |skipped: &Skipped| {
        format!("  {}: {}\n    hint: {}\n", skipped.name, skipped.why, skipped.remedy)
    };
    text::heading("Not tried") + &skipped.iter().map(line).collect::<String>()
}

/// Renders the reason, then the line to paste alone, so that `tail -n 1` yields it.
fn verdict(diagnosis: &Diagnosis) -> String {
    let verdict = &diagnosis.verdict;
    let heading = text::heading("Verdict");
    match &verdict.apply {
        Some(line) => format!("{heading}  {}; paste this to apply it:\n{line}\n", verdict.reason),
        None => format!("{heading}  {}\n", verdict.reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::budget::{Budget, Ledger};
    use pagetax_core::counter::Reading;
    use pagetax_core::diagnosis::{Basis, compare_trials, judge};
    use pagetax_core::exit::Exit;
    use pagetax_core::report::Environment;
    use pagetax_core::sequential::Stopping;

    fn trial(name: &str, ms: u64, share: f64, faults: u64) -> Trial {
        // Each trial has its slow run in another round.
        let mut noise = [985, 1_000, 1_015];
        noise.rotate_left(name.len() % 3);
        let runs_ns: Vec<u64> = noise.iter().map(|k| ms * k * 1_000).collect();
        Trial {
            name: name.into(),
            page_bytes: None,
            mechanism: String::new(),
            median_ns: ms * 1_000_000,
            user_ns: runs_ns.iter().map(|ns| ns / 10 * 8).collect(),
            kernel_ns: runs_ns.iter().map(|ns| ns / 10).collect(),
            runs_ns,
            speedup: None,
            speedup_over_base: None,
            took: Took {
                bytes: Some(1 << 28),
                fraction: Some(share),
                why: (share < 0.9).then(|| "outside whole blocks of the mapping ".repeat(5)),
            },
            peak_resident_bytes: Some(277 << 20),
            untouched_bytes: None,
            probe_ns: Vec::new(),
            steady_ns: Vec::new(),
            fault_counts: vec![faults; 3],
            start_ns: Vec::new(),
            loads: Vec::new(),
            exit: Exit::Code(0),
        }
    }

    fn diagnosis(command: &str, mut trials: Vec<Trial>) -> Diagnosis {
        compare_trials(&mut trials, Stopping::Fixed, Basis::Elapsed);
        let mut verdict = judge(&trials, Basis::Elapsed, "");
        if verdict.winner.is_some() {
            let line = format!("pagetax ppgsz -o 'heap=2M' {command}");
            verdict.systemd = vec!["WorkingDirectory=/home/u".into(), format!("ExecStart={line}")];
            verdict.dockerfile = vec!["WORKDIR /home/u".into(), format!("CMD {line}")];
            verdict.apply = Some(line);
        }
        let mut cpu = Ledger::new(Account::Cpu, 3_640_000_000);
        let derived = |value, low, high| Reading::Derived { value, low, high };
        cpu.row("translation", derived(1_240_000_000, 600_000_000, 1_910_000_000), "the trials");
        cpu.row("minor_fault", derived(146_000_000, 98_100_000, 174_000_000), "12 of 16 stacks");
        cpu.row("zero_copy", derived(12_100_000, 2_160_000, 55_000_000), "1 of 16 stacks");
        cpu.row("swap", Reading::Measured(1_000), "x");
        cpu.row("reclaim", derived(0, 0, 37_600_000), "0 of 16 stacks");
        cpu.row("compaction", Reading::Measured(0), "x");
        let budget = Budget::new(cpu, Ledger::new(Account::Wall, 1), Vec::new());
        let skipped = |name: &str| Skipped {
            name: name.into(),
            page_bytes: 1 << 16,
            why: "this system is set otherwise; it takes /sys/kernel/mm/transparent_hugepage/ and \
                  more of the same"
                .into(),
            remedy: "add --allow-sysfs".into(),
        };
        let warning = Warning { id: "x".into(), text: "busy ".repeat(40), remedy: "y".into() };
        Diagnosis {
            basis: Basis::Elapsed,
            side_by_side: false,
            states: Vec::new(),
            parts: None,
            command: command.split(' ').map(String::from).collect(),
            exit: Exit::Code(0),
            skipped: vec![skipped("mthp-64K"), skipped("text-2M")],
            budget: Some(budget),
            verdict,
            environment: Environment::default(),
            warnings: vec![warning.clone(), warning],
            trials,
        }
    }

    fn all() -> Vec<Trial> {
        vec![
            trial(AS_IS, 3_660, 0.0, 131_082),
            trial(BASE, 4_120, 0.0, 131_100),
            trial("thp-2M", 2_480, 0.87, 266),
            trial("stack-2M", 3_830, 0.0, 131_090),
            trial("all-2M", 2_470, 0.98, 260),
        ]
    }

    /// Asserts that a report fits a screen. Lines to paste may be as long as the command.
    fn fits(diagnosis: &Diagnosis) -> String {
        let text = anstream::adapter::strip_str(&render(diagnosis)).to_string();
        let count = text.lines().count();
        assert!(count <= LINES, "{count} lines:\n{text}");
        let is_pasted = |line: &&str| line.contains("ppgsz") || line.contains("/home/u");
        for line in text.lines().filter(|line| !is_pasted(line)) {
            assert!(line.chars().count() <= COLUMNS, "{line}");
        }
        text
    }

    #[test]
    fn a_winner_fits_a_screen_and_ends_in_the_line_to_paste() {
        let text = fits(&diagnosis("python3 names.py", all()));
        assert_eq!(text.lines().last(), Some("pagetax ppgsz -o 'heap=2M' python3 names.py"));
        assert!(text.contains("Virtual memory takes 38 % of its CPU time (19–60 %)"), "{text}");
        assert!(
            text.contains("thp-2M, stack-2M: outside whole blocks"),
            "87 % owes a reason: {text}"
        );
        let faults = "fewer page faults (131 082 → 266)";
        assert!(text.contains(&format!("saved: fewer page walks, then {faults}")), "{text}");
        assert!(text.contains("(1 more: --full)"), "{text}");
        assert!(!text.contains("reclaim"), "a cause that took no time is left out: {text}");
        assert!(text.contains("mthp-64K  not tried: this system"), "{text}");
        let winner = text.lines().find(|line| line.contains('◀')).unwrap();
        assert!(winner.trim_start().starts_with("thp-2M") && winner.contains("87 %"), "{winner}");
    }

    #[test]
    fn other_verdicts_fit_a_screen_too() {
        let same = [AS_IS, BASE, "thp-2M", "stack-2M", "all-2M"];
        let same = same.map(|name| trial(name, 1_000, 0.95, 10)).to_vec();
        let mut disagrees = diagnosis("true", all());
        let text = "`thp-2M` saved at least 60 % of CPU time".to_string();
        disagrees.warnings = vec![Warning { id: TAX_DISAGREES.into(), text, remedy: "x".into() }];
        let shown = fits(&disagrees);
        assert!(shown.contains("saved at least 60 %") && !shown.contains("warning:"), "{shown}");
        let none = fits(&diagnosis("true", same));
        assert!(!none.contains("Apply it"), "{none}");
        fits(&diagnosis(&"long word ".repeat(50), all()));
        let sizes = ["64K", "128K", "256K", "512K", "1M", "4M", "8M", "16M", "32M", "64M", "1G"];
        let slower =
            (3_000..).zip(sizes).map(|(ms, size)| trial(&format!("mthp-{size}"), ms, 0.5, 99));
        let many = fits(&diagnosis("true", all().into_iter().chain(slower).collect()));
        let shown = ["as-is", "base", "thp-2M", "all-2M", "slower trials: --full"];
        shown.iter().for_each(|part| assert!(many.contains(part), "{part}: {many}"));
        assert!(many.contains("not tried (--full has the reasons): mthp-64K, text-2M"), "{many}");
        fits(&diagnosis("a\nb", vec![trial(AS_IS, 1_000, 0.0, 1)]));
    }
}
