//! A memory bill as text, as Markdown for a pull request, as JUnit, and as annotations of GitHub Actions.

use super::text;
use pagetax_core::bill::{Bill, BillFinding, BillReading, CommandBill, Outcome};
use pagetax_core::counter::Unit;

const HEADINGS: [&str; 5] = ["reading", "baseline", "now", "", ""];
const NUMERIC: [usize; 3] = [1, 2, 3];

/// Renders the bill of each command, with the baseline's values beside it if there is one.
pub fn render(bill: &Bill, baseline: Option<&Bill>) -> String {
    let bold = anstyle::Style::new().bold();
    let mut out = String::new();
    for command in &bill.commands {
        let words = command.command.join(" ");
        out += &format!("{bold}{}{bold:#}: {words}\n", command.name);
        let old = baseline.and_then(|old| old.commands.iter().find(|one| one.name == command.name));
        let row = |(id, now): (&String, &BillReading)| row(id, now, old, command);
        out += &text::table(&HEADINGS, &NUMERIC, command.readings.iter().map(row).collect());
        out += &command.findings.iter().map(|finding| sentence(finding) + "\n").collect::<String>();
        out += "\n";
    }
    out + &verdict(bill) + "\n"
}

fn row(
    id: &str,
    now: &BillReading,
    old: Option<&CommandBill>,
    command: &CommandBill,
) -> Vec<String> {
    let before = old.and_then(|old| old.readings.get(id));
    let value = |reading: &BillReading| match (reading.value, reading.unit) {
        (None, _) => text::MISSING.into(),
        (Some(value), Unit::Count) if value.fract() == 0.0 => text::count(value as u64),
        (Some(value), _) => reading.in_words(value),
    };
    let change = match (now.value, before.and_then(|before| before.value)) {
        (Some(now), Some(was)) if was > 0.0 && now != was => {
            format!("{:+.1} %", (now / was - 1.0) * 100.0)
        }
        _ => String::new(),
    };
    let found = command.findings.iter().find(|finding| finding.reading == id);
    let mark = found.map(|finding| word(finding.outcome)).unwrap_or_default();
    vec![id.into(), before.map_or(String::new(), value), value(now), change, mark.into()]
}

fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Failed => "FAILED",
        Outcome::NotJudged => "not judged",
        Outcome::Better => "better",
    }
}

fn sentence(finding: &BillFinding) -> String {
    let cause =
        finding.cause.as_ref().map_or(String::new(), |cause| format!("\n    cause: {cause}"));
    format!("  {}: {}{cause}", word(finding.outcome), finding.text)
}

fn verdict(bill: &Bill) -> String {
    let failed = bill.commands.iter().filter(|command| has_failed(command)).count();
    match failed {
        0 => format!("{} commands: none takes more memory than it may", bill.commands.len()),
        failed => {
            format!("{failed} of {} commands take more memory than they may", bill.commands.len())
        }
    }
}

fn has_failed(command: &CommandBill) -> bool {
    command.findings.iter().any(|finding| finding.outcome == Outcome::Failed)
}

/// Renders the findings for a pull request, in few lines.
pub fn markdown(bill: &Bill) -> String {
    let mut out = format!("**pagetax**: {}\n\n", verdict(bill));
    let mut rows = Vec::new();
    for command in &bill.commands {
        for finding in &command.findings {
            let cause = finding.cause.clone().unwrap_or_default();
            rows.push(vec![
                command.name.clone(),
                word(finding.outcome).into(),
                finding.text.clone(),
                cause,
            ]);
        }
    }
    if !rows.is_empty() {
        out += &text::markdown_table(&["command", "", "finding", "cause"], &[], rows);
    }
    out
}

/// Renders a test case for each command.
pub fn junit(bill: &Bill) -> String {
    let failed = bill.commands.iter().filter(|command| has_failed(command)).count();
    let mut out = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"pagetax\" tests=\"{}\" failures=\"{failed}\">\n",
        bill.commands.len()
    );
    for command in &bill.commands {
        out += &format!("  <testcase name=\"{}\">\n", escaped(&command.name));
        for finding in &command.findings {
            let text = escaped(&sentence(finding));
            out += &match finding.outcome {
                Outcome::Failed => {
                    let short = escaped(&finding.text);
                    format!("    <failure message=\"{short}\">{text}</failure>\n")
                }
                _ => format!("    <system-out>{text}</system-out>\n"),
            };
        }
        out += "  </testcase>\n";
    }
    out + "</testsuite>\n"
}

/// Renders annotations: errors for what failed, notices for the rest.
pub fn github(bill: &Bill) -> String {
    let mut out = String::new();
    for command in &bill.commands {
        for finding in &command.findings {
            let kind = if finding.outcome == Outcome::Failed { "error" } else { "notice" };
            let cause = finding.cause.as_ref().map_or(String::new(), |cause| format!("; {cause}"));
            let name = property(&command.name);
            out += &format!(
                "::{kind} title=pagetax {name}::{}\n",
                data(&(finding.text.clone() + &cause))
            );
        }
    }
    out
}

fn escaped(text: &str) -> String {
    let one = |letter: char| match letter {
        '&' => "&amp;".into(),
        '<' => "&lt;".into(),
        '>' => "&gt;".into(),
        '"' => "&quot;".into(),
        // XML 1.0 has no way to write other control characters.
        letter if letter.is_control() && letter != '\n' => "\u{fffd}".into(),
        letter => letter.to_string(),
    };
    text.chars().map(one).collect()
}

/// Escapes the message of a workflow command.
fn data(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

/// Escapes a property of a workflow command.
fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::counter::Provenance;
    use pagetax_core::exit::Exit;
    use pagetax_core::report::Environment;

    fn bill(name: &str) -> Bill {
        let reading = BillReading::of(Unit::Count, Provenance::Measured, &[200]);
        let finding = BillFinding {
            outcome: Outcome::Failed,
            reading: "minor_fault_count".into(),
            text: "minor_fault_count was 100 and is 200".into(),
            cause: Some("it touches more memory".into()),
        };
        let command = CommandBill {
            name: name.into(),
            command: vec!["sort".into()],
            exit: Exit::Code(0),
            cpu: "x".into(),
            readings: [("minor_fault_count".to_string(), reading)].into(),
            findings: vec![finding],
        };
        Bill { commands: vec![command], environment: Environment::default() }
    }

    #[test]
    fn each_form_names_the_command_the_reading_and_the_cause() {
        let bill = bill("sort");
        let forms = [render(&bill, Some(&bill)), markdown(&bill), junit(&bill), github(&bill)];
        for form in forms {
            for part in ["sort", "minor_fault_count was 100 and is 200", "it touches more memory"] {
                assert!(form.contains(part), "{part}: {form}");
            }
        }
        assert!(junit(&bill).contains("failures=\"1\""));
        assert!(github(&bill).starts_with("::error title=pagetax sort::"));
    }

    #[test]
    fn hostile_names_break_no_form() {
        let bill = bill("a\"<b>|\n::error::,\u{1}");
        assert!(!junit(&bill).contains("<b>") && !junit(&bill).contains('\u{1}'));
        assert_eq!(github(&bill).lines().count(), 1);
        let table = markdown(&bill);
        assert!(table.lines().any(|line| line.contains("\\|")), "{table}");
    }
}
