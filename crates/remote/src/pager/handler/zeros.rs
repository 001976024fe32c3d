//! Faults on untouched pages, which are filled with zeros.

use super::*;

impl FaultHandler {
    /// Installs zeros for an untouched page and, in a stream, for its successors or predecessors.
    pub(super) fn zero(
        &self,
        held: HeldCluster<'_>,
        page: usize,
        is_write: bool,
        ahead: Readahead,
    ) -> bool {
        let shared = &self.shared;
        add(&shared.stats.zero_fault_count, 1);
        let (goes_down, more) = ahead.zeros_ahead();
        let most = if goes_down { page } else { shared.table.pages() - page - 1 };
        let more = more.min(most);
        let room = 1 + shared.take_room(more);
        let (mut done, mut held) = (0, Some(held));
        while done < room {
            let next = if goes_down { page - done } else { page + done };
            let cluster = held.take().unwrap_or_else(|| shared.table.hold(cluster_of(next)));
            let all = match goes_down {
                true => cluster.pages().start.max(page + 1 - room)..next + 1,
                false => next..cluster.pages().end.min(page + room),
            };
            match self.install_zeros(&cluster, all.clone(), goes_down, is_write) {
                Ok(installed) => {
                    done += installed;
                    if installed > 0 {
                        shared.note_memory_found();
                        shared.enqueue(cluster_of(next));
                    }
                    if installed < all.len() {
                        break;
                    }
                }
                Err(error) if done == 0 => {
                    shared.give_room(room - 1);
                    return self.handle_zero_failure(cluster, page, error);
                }
                Err(_) => break,
            }
        }
        shared.give_room(room - done);
        true
    }

    /// Handles the kernel's refusal to install zeros. After ENOMEM, the thread faults again until the time
    /// limit.
    pub(super) fn handle_zero_failure(
        &self,
        held: HeldCluster<'_>,
        page: usize,
        error: Errno,
    ) -> bool {
        let shared = &self.shared;
        // The evictor can make room, and may need the cluster for that.
        drop(held);
        if shared.may_retry(error) {
            shared.uffd.wake(shared.arena.span(page, 1));
            return false;
        }
        shared.log(&format!("page {page} cannot be filled with zeros: {error}"));
        let held = shared.table.hold(cluster_of(page));
        match held.get(page).location() {
            PageLocation::Untouched => self.poison(&held, page),
            _ => {
                shared.uffd.wake(shared.arena.span(page, 1));
                false
            }
        }
    }

    /// Fills pages of one cluster with zeros, from the first on or down from the last, until one is
    /// not untouched. If a mapping ends in between, fills only the first. Returns the number.
    pub(super) fn install_zeros(
        &self,
        held: &HeldCluster<'_>,
        all: Range<usize>,
        goes_down: bool,
        is_write: bool,
    ) -> Result<usize, Errno> {
        let is_untouched = |page: &usize| held.get(*page).location() == PageLocation::Untouched;
        let install = |count: usize| {
            let first = if goes_down { all.end - count } else { all.start };
            let to = self.shared.arena.span(first, count);
            match is_write {
                true => self.shared.uffd.copy(to, self.zeros.bytes(0, count))?,
                false => drop(self.shared.uffd.zero(to)?),
            }
            self.mark_resident(held, run_of(first - held.pages().start, count));
            Ok(count)
        };
        let count = match goes_down {
            true => all.clone().rev().take_while(is_untouched).count(),
            false => all.clone().take_while(is_untouched).count(),
        };
        // A run that crosses the end of a mapping is refused as a whole.
        match count {
            0 | 1 => (0..count).try_fold(0, |_, _| install(1)),
            _ => install(count).or_else(|_| install(1)),
        }
    }
}
