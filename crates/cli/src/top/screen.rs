//! The screen of `pagetax top`: the terminal, the keys, and the commands that they start.
//!
//! Invariant: the terminal is restored however the command ends: by a key, an error, a signal or a panic.

use super::model::TopModel;
use super::page::{self, LineKind, PageShape};
use anyhow::{Context, Result};
use pagetax_host::measure::system::LOOK_INTERVAL_NS;
use pagetax_host::sys::signal::{PassedOn, asked_to_stop};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::terminal::{disable_raw_mode, enable_raw_mode};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::{DefaultTerminal, Frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::IsTerminal;
use std::process::{Child, Command};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// A request of the user that the model cannot fulfil by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// End.
    Quit,
    /// Run pagetax with these words.
    Run(Vec<String>),
}

/// Changes the model as a key wants, and returns what is left to do.
pub fn press(model: &mut TopModel, key: KeyEvent, page: isize) -> Option<Request> {
    model.message = None;
    if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
        return Some(Request::Quit);
    }
    if std::mem::take(&mut model.is_help) {
        return None;
    }
    match key.code {
        KeyCode::Char('q') => return Some(Request::Quit),
        KeyCode::Char('?' | 'h') => model.is_help = true,
        KeyCode::Up | KeyCode::Char('k') => model.select(-1),
        KeyCode::Down | KeyCode::Char('j') => model.select(1),
        KeyCode::PageUp => model.select(-page),
        KeyCode::PageDown => model.select(page),
        KeyCode::End => model.select(isize::MAX),
        KeyCode::Home | KeyCode::Esc => model.close(),
        KeyCode::Char('>' | 's') | KeyCode::Right => model.sort_by_next(true),
        KeyCode::Char('<') | KeyCode::Left => model.sort_by_next(false),
        KeyCode::Char('r') => model.is_reversed = !model.is_reversed,
        KeyCode::Char('c') => model.turn(),
        KeyCode::Enter => model.open(),
        KeyCode::Char(letter @ ('w' | 'd' | 'm')) => return command(model, letter),
        _ => {}
    }
    None
}

/// Returns the command of a key for the selected process.
fn command(model: &mut TopModel, letter: char) -> Option<Request> {
    let pid = match model.selected_pid() {
        Ok(pid) => pid.to_string(),
        Err(why) => {
            model.message = Some(why);
            return None;
        }
    };
    let words = match letter {
        'w' => vec!["why", &pid],
        'd' => vec!["diagnose", "-p", &pid, "--dry-run"],
        _ => vec!["pmap", &pid],
    };
    Some(Request::Run(words.into_iter().map(String::from).collect()))
}

/// Draws the page, or the help.
pub fn draw(frame: &mut Frame<'_>, model: &TopModel, is_ascii: bool, has_color: bool) {
    let area = frame.area();
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let lines: Vec<Line<'_>> = if model.is_help {
        page::help().into_iter().map(Line::raw).collect()
    } else {
        let shape = PageShape { width, height, is_ascii, is_screen: true };
        let lines = page::lines(model, shape).into_iter();
        lines
            .map(|line| Line::styled(padded(line.text, width), style(line.kind, has_color)))
            .collect()
    };
    frame.render_widget(ratatui::text::Text::from(lines), area);
}

/// Fills a line, so that its style reaches the right edge.
fn padded(text: String, width: usize) -> String {
    format!("{text:<width$}")
}

fn style(kind: LineKind, has_color: bool) -> Style {
    let plain = Style::new();
    match kind {
        LineKind::Summary | LineKind::Row => plain,
        LineKind::Notice if has_color => plain.fg(Color::Yellow),
        LineKind::Notice => plain,
        LineKind::Headings => plain.add_modifier(Modifier::BOLD | Modifier::UNDERLINED),
        LineKind::SelectedRow => plain.add_modifier(Modifier::REVERSED),
        LineKind::Keys => plain.add_modifier(Modifier::DIM),
    }
}

/// The source of intervals.
pub trait IntervalSource {
    /// Reads the samples that have come.
    fn look(&mut self);
    /// Takes the next interval if it is due, and returns true if it was.
    fn advance(&mut self, model: &mut TopModel) -> bool;
}

/// The terminal in its mode of a full screen. Dropping it restores the terminal.
struct Screen {
    terminal: DefaultTerminal,
}

impl Screen {
    fn open() -> Result<Screen> {
        let hint = "the terminal does not take a full screen\n  hint: pagetax top --once";
        Ok(Screen { terminal: ratatui::try_init().context(hint)? })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows intervals until the user quits.
pub fn show(
    source: &mut dyn IntervalSource,
    model: &mut TopModel,
    is_ascii: bool,
    has_color: bool,
) -> Result<()> {
    let mut screen = Screen::open()?;
    let mut is_stale = true;
    while !asked_to_stop() {
        if is_stale {
            screen.terminal.draw(|frame| draw(frame, model, is_ascii, has_color))?;
        }
        let Some(event) = next_event()? else { break };
        is_stale = event.is_some();
        let request = match event {
            Some(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                let page = isize::from(screen.terminal.size()?.height as i16) / 2;
                press(model, key, page.max(1))
            }
            _ => None,
        };
        source.look();
        is_stale |= source.advance(model);
        match request {
            Some(Request::Quit) => break,
            Some(Request::Run(words)) => {
                drop(screen);
                run(source, model, &words, has_color)?;
                screen = Screen::open()?;
                is_stale = true;
            }
            None => {}
        }
    }
    Ok(())
}

/// Runs pagetax with these words on the normal screen, and waits for a key. The watch goes on meanwhile.
fn run(
    source: &mut dyn IntervalSource,
    model: &mut TopModel,
    words: &[String],
    has_color: bool,
) -> Result<()> {
    crate::output::say(&format!("\npagetax {}", words.join(" ")));
    let program = std::env::current_exe().context("the program's own file is not known")?;
    let color: &[&str] = if has_color { &[] } else { &["--color", "never"] };
    match Command::new(program).args(color).args(words).spawn() {
        Ok(child) => wait(source, model, child)?,
        Err(error) => crate::output::say(&format!("pagetax does not start: {error}")),
    }
    crate::output::say("\nEnter goes back to pagetax top.");
    enable_raw_mode()?;
    let waited = wait_for_key(source, model);
    disable_raw_mode()?;
    waited
}

/// Waits for a command. A signal of the terminal ends the command and not this program.
fn wait(source: &mut dyn IntervalSource, model: &mut TopModel, mut child: Child) -> Result<()> {
    let signals = PassedOn::watch()?;
    let mut looked = Instant::now();
    while child.try_wait()?.is_none() {
        if signals.take().is_some() {
            child.kill()?;
        }
        std::thread::sleep(Duration::from_millis(20));
        if looked.elapsed().as_nanos() as u64 >= LOOK_INTERVAL_NS / 2 {
            looked = Instant::now();
            source.look();
            source.advance(model);
        }
    }
    Ok(())
}

fn wait_for_key(source: &mut dyn IntervalSource, model: &mut TopModel) -> Result<()> {
    while !asked_to_stop() {
        let Some(event) = next_event()? else { break };
        if let Some(Event::Key(key)) = event {
            let is_end = key.modifiers.contains(KeyModifiers::CONTROL);
            if is_end || matches!(key.code, KeyCode::Enter | KeyCode::Esc | KeyCode::Char('q')) {
                return Ok(());
            }
        }
        source.look();
        source.advance(model);
    }
    Ok(())
}

/// Waits a look for a key or another size, and returns it, if there was one; None if the terminal is gone.
/// The library that reads keys never returns from a terminal that is gone.
fn next_event() -> Result<Option<Option<Event>>> {
    for wait_ns in [0, LOOK_INTERVAL_NS] {
        if !is_there(wait_ns)? {
            return Ok(None);
        }
        if event::poll(Duration::ZERO)? {
            return Ok(Some(Some(event::read()?)));
        }
    }
    Ok(Some(None))
}

/// True if keys come from standard input. A terminal that is gone is none any more, so it is asked once.
static READS_STDIN: LazyLock<bool> = LazyLock::new(|| std::io::stdin().is_terminal());

/// Waits for input of the terminal, and returns true if the terminal is still there.
fn is_there(wait_ns: u64) -> Result<bool> {
    let input = std::io::stdin();
    let time = Timespec::try_from(Duration::from_nanos(wait_ns))?;
    if !*READS_STDIN {
        // Keys come from the controlling terminal, whose end is a signal.
        std::thread::sleep(Duration::from_nanos(wait_ns));
        return Ok(true);
    }
    let mut polled = [PollFd::new(&input, PollFlags::IN)];
    match poll(&mut polled, Some(&time)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(!polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR))
}

#[cfg(test)]
mod tests {
    use super::super::model::View;
    use super::super::model::tests::{model, process};
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn screen(model: &TopModel, has_color: bool) -> Terminal<TestBackend> {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw(frame, model, false, has_color)).unwrap();
        terminal
    }

    fn text(model: &TopModel) -> String {
        screen(model, false).backend().to_string()
    }

    #[test]
    fn a_screen_of_80_by_24_has_system_processes_heat_and_keys() {
        let model =
            model(vec![process(4711, "postgres", Some(400), 20_000), process(2, "sh", Some(0), 0)]);
        let text = text(&model);
        for part in ["VM ", "kswap", "free 2M", "PID", "*VM", "VM 60 s", ">    4711", "postgres"] {
            assert!(text.contains(part), "no {part}: {text}");
        }
        assert!(text.contains("zero") && text.contains("300M") && text.contains('▆'), "{text}");
        assert!(text.contains("q quit"), "{text}");
    }

    #[test]
    fn without_colour_no_cell_has_one() {
        let mut model = model(vec![process(1, "a", None, 5)]);
        model.top.missing.insert("vm_cpu_ns".into(), "not root".into());
        let colored = |has_color| {
            let terminal = screen(&model, has_color);
            let cells = terminal.backend().buffer().content();
            cells.iter().filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset).count()
        };
        assert_eq!(colored(false), 0);
        assert!(colored(true) > 0);
    }

    fn key(model: &mut TopModel, code: char) -> Option<Request> {
        press(model, KeyEvent::new(KeyCode::Char(code), KeyModifiers::NONE), 10)
    }

    #[test]
    fn keys_run_commands_for_the_selected_process() {
        let mut model = model(vec![process(7, "a", Some(9), 0), process(8, "b", Some(1), 0)]);
        let words = |text: &str| Some(Request::Run(text.split(' ').map(String::from).collect()));
        assert_eq!(key(&mut model, 'w'), words("why 7"));
        key(&mut model, 'j');
        assert_eq!(key(&mut model, 'd'), words("diagnose -p 8 --dry-run"));
        assert_eq!(key(&mut model, 'm'), words("pmap 8"));
        key(&mut model, 'c');
        assert_eq!(key(&mut model, 'w'), None);
        assert!(text(&model).contains("choose a process"));
        press(&mut model, KeyEvent::new(KeyCode::Enter, KeyModifiers::NONE), 10);
        assert_eq!(model.view, View::Members("/box".into()));
        assert_eq!(key(&mut model, 'q'), Some(Request::Quit));
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(press(&mut model, interrupt, 10), Some(Request::Quit));
    }

    #[test]
    fn the_help_is_a_screen_that_any_key_leaves() {
        let mut model = model(vec![process(7, "a", Some(9), 0)]);
        key(&mut model, '?');
        assert!(text(&model).contains("pagetax why PID"));
        assert_eq!(key(&mut model, 'q'), None);
        assert!(text(&model).contains("q quit"));
    }
}
