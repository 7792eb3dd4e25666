import { Disposables } from './dom';

/**
 * Draws at most once in a frame of the screen, and not while nobody can see it.
 *
 * Args:
 *   target: what must be seen.
 *   draw: told when the frame began, in milliseconds.
 */
export class Frames {
  private readonly disposables = new Disposables();
  private isVisible = true;
  private isWanted = false;
  private frame = 0;

  constructor(
    target: Element,
    private readonly draw: (now: number) => void
  ) {
    const observer = new IntersectionObserver(entries => {
      this.isVisible = entries[entries.length - 1]?.isIntersecting ?? true;
      this.schedule();
    });
    observer.observe(target);
    this.disposables.add(() => observer.disconnect());
    this.disposables.listen(document, 'visibilitychange', () => this.schedule());
    this.disposables.add(() => cancelAnimationFrame(this.frame));
  }

  /** Draw in the next frame in which it can be seen. */
  request(): void {
    this.isWanted = true;
    this.schedule();
  }

  dispose(): void {
    this.isWanted = false;
    this.disposables.dispose();
  }

  private schedule(): void {
    if (this.isWanted && this.isVisible && !document.hidden && this.frame === 0) {
      this.frame = requestAnimationFrame(now => this.run(now));
    }
  }

  private run(now: number): void {
    this.frame = 0;
    this.isWanted = false;
    this.draw(now);
  }
}
